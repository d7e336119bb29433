"""The settings of a run of the biped: method, seed, terrain, length, and those of PPO."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from experiments.paper.bipedal.ppo import Policy, Settings
from experiments.runner.runs import Process

Terrain = Literal["standard", "rough"]
Name = Literal[
    "momentum",
    "adam",
    "fop-paper",
    "fop-paper-1e-5",
    "fop",
    "fop-5e-4",
    "adam-sb3",  # that of Stable-Baselines3
]
Through = Literal["optim", "functional"]
RATES: dict[Name, float] = {
    "momentum": 3.5e-4,
    "adam": 3e-4,
    "fop-paper": 3e-4,
    "fop-paper-1e-5": 3e-4,
    "fop": 3e-4,
    "fop-5e-4": 3e-4,
    "adam-sb3": 3e-4,
}
# The paper does not print its meta learning rate for this task: here FOP's own, and a tenth of it.
META_RATES: dict[Name, float] = {"fop-paper": 1e-4, "fop-paper-1e-5": 1e-5, "fop": 5e-3, "fop-5e-4": 5e-4}


@dataclass(frozen=True)
class RunSettings(ABC):
    """The settings of a run."""

    method: Name
    lr: float
    seed: int  # of the first weights, the actions, and the starts
    terrain: Terrain
    landscape: int  # the seed of the terrain
    steps: int  # of all environments together, rounded down to whole improvements of the policy
    environments: int
    ppo: Settings
    through: Through
    scored: int = 20  # the last episodes, whose mean return is a score

    def __post_init__(self) -> None:
        at_once = self.environments * self.ppo.horizon
        if min(self.environments, self.ppo.horizon) < 1:
            raise ValueError(
                f"A run has one environment or more, and a horizon of one step or more, got "
                f"environments={self.environments} and ppo.horizon={self.ppo.horizon}. Pass such numbers."
            )
        if self.steps < at_once:
            raise ValueError(
                f"The policy is improved after {at_once} steps, got steps={self.steps}. Pass more."
            )
        if not 2 <= self.ppo.minibatch <= at_once:
            raise ValueError(
                f"A minibatch has 2 to {at_once} steps, as many as are taken between two improvements, got "
                f"{self.ppo.minibatch}. Pass such a number."
            )

    @property
    def name(self) -> str:
        return f"{self.terrain}-{self.method}-seed{self.seed}"

    @property
    def epochs(self) -> int:
        """How often the policy is improved."""
        return self.steps // (self.environments * self.ppo.horizon)

    @property
    def as_printed(self) -> bool:
        """Whether M is learned by the rule that the paper prints."""
        return self.method.startswith("fop-paper")

    def policy(self) -> Policy:
        """Return the policy with the first weights of this seed."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)  # nn.Module draws its first weights from the global generator
            return Policy(observations=24, actions=4)

    @abstractmethod
    def start(self) -> Process: ...
