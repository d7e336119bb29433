"""The settings of maml."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.runner.settings import FromZero


@dataclass(frozen=True)
class Config:
    """MAML on sinusoids: a start that adapts in a few steps, and the same loop by higher.

    The setting of Finn et al. (2017): amplitudes from 0.1 to 5, phases from 0 to π, ten points of each task,
    a network of 1-40-40-1, inner learning rate 0.01, Adam at 0.001. Every recipe sees the same tasks.

    smoke: seconds. small: 4,000 meta steps of 25 tasks, about five minutes on one core.
    """

    preset: Literal["smoke", "small"] = "small"
    width: int = 40  # of both hidden layers
    tasks: int = 25  # of a meta step
    shots: int = 10  # points of a task to adapt to, and as many to be asked for
    meta_steps: int = 4000  # of each recipe
    unseen: int = 600  # tasks to adapt to in the end
    steps: int = 10  # of adapting, in the end
    compared: int = 50  # meta steps that every way takes
    rounds: int = 15  # of measuring time, each way once in each
    compiled: bool = True  # compile ours
    isolated: bool = True  # a process for each measure of memory. Without, resident memory is not reported
    seed: FromZero[int] = 0  # of the network and the tasks; those in the end have the next
    threads: int = 1
    out: Path = Path("runs/maml")


PRESETS = {
    "smoke": Config(
        preset="smoke",
        width=8,
        tasks=3,
        meta_steps=20,
        unseen=10,
        compared=3,
        rounds=1,
        compiled=False,
        isolated=False,
        out=Path("runs/maml-smoke"),
    ),
    "small": Config(),
}
