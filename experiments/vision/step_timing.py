"""The time that each method adds to a step: all methods take turns in one process, by processor time.

It is a run like any other, kept with its machine and commit. Nothing else should run beside it.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Protocol

import torch
from torch.optim import Optimizer

from experiments.runner.runs import Row
from experiments.vision.loop import Loop
from experiments.vision.methods import Method
from metafop import tree
from metafop.optim import FOP
from metafop.tensorboard import Logger

STEPS_PER_TURN = 10  # steps in a turn: as many as FOP takes for each that it learns from


class Trained(Protocol):
    """The settings of a run that trains a network by some method."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def method(self) -> Method: ...

    def start(self) -> Loop: ...


@dataclass(frozen=True)
class Timing:
    """The time of a step by each of some methods; the others are compared with the first."""

    kind: ClassVar[str] = "experiments.timing"

    like: Trained  # the network and the batches
    methods: tuple[Method, ...]
    rounds: int

    @property
    def name(self) -> str:
        return "timing"

    @property
    def epochs(self) -> int:
        return self.rounds

    def start(self) -> "TimingRun":
        return TimingRun(self)


class TimingRun:
    """Every method's network takes ten steps, in turn; the round before the first only warms up."""

    def __init__(self, timing: Timing) -> None:
        self._made = {method.name: replace(timing.like, method=method).start() for method in timing.methods}
        feed = next(iter(self._made.values())).feed
        self._batches = [next(feed) for _ in range(min(STEPS_PER_TURN, feed.steps))]
        self._rounds, self._rows = timing.rounds, list[dict[str, float]]()
        for name in self._made:
            self._turn(name)

    @property
    def columns(self) -> tuple[str, ...]:
        return ("step", *self._made)

    @property
    def epochs(self) -> float:
        return len(self._rows)

    def advance(self, logger: Logger) -> list[Row]:
        if len(self._rows) >= self._rounds:
            return []
        self._rows.append({"step": len(self._rows)} | {name: self._turn(name) for name in self._made})
        return [self._rows[-1]]

    def _turn(self, name: str) -> float:
        """Return the seconds that a step takes, on average over a turn."""
        loop = self._made[name]
        clock = time.perf_counter if torch.cuda.is_available() else time.process_time
        began = clock()
        for i in range(STEPS_PER_TURN):
            loop.learn(*self._batches[i % len(self._batches)])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (clock() - began) / STEPS_PER_TURN

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = state["rows"]

    def finish(self, folder: Path) -> dict[str, Any]:
        """Return the numbers learned besides the weights, and the median of the time over the first's."""
        base = next(iter(self._made))
        result: dict[str, Any] = {}
        for name, loop in self._made.items():
            ratios = [row[name] / row[base] for row in self._rows]
            result[f"{name}_parameters"] = _learned(loop.optimizer)
            result[f"{name}_percent"] = 100 * (median(ratios) - 1)
        return result


def _learned(optimizer: Optimizer) -> int:
    if not isinstance(optimizer, FOP):
        return 0
    return sum(leaf.numel() for leaf in tree.leaves(optimizer.inspect()[1].precond))
