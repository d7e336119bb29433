"""A run of the biped, as the runner takes it."""

from dataclasses import dataclass
from typing import ClassVar

from experiments.paper.bipedal.settings import RunSettings
from experiments.runner.runs import Process


@dataclass(frozen=True)
class BipedalTask(RunSettings):
    """Trains a policy by our PPO, or for the method adam-sb3 by that of Stable-Baselines3."""

    kind: ClassVar[str] = "experiments.walk"

    def start(self) -> Process:
        # Imported here because they need the extra `rl`, or `peers`.
        if self.method == "adam-sb3":
            from experiments.paper.bipedal.sb3_training import SB3TrainingRun

            return SB3TrainingRun(self)
        from experiments.paper.bipedal.training import TrainingRun

        return TrainingRun(self)
