"""What is learned in each setting, and how well a network reads digits after training on ten images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from experiments.measuring.timing import take_turns
from experiments.studies.distillation.config import Config
from experiments.studies.distillation.problem import (
    Problem,
    batches,
    draw_digits,
    draw_start,
    means,
    noise,
)
from metafop import Adam, Meta, Scheduled
from metafop.hypergradients import Adjoint, adjoint, autograd
from metafop.protocols import Estimator
from metafop.types import Params
from metafop.unrolled import Unrolled, UnrolledState


@dataclass(frozen=True)
class Setting:
    """What is learned, and whether training starts anew at each meta step."""

    label: str
    learn: tuple[str, ...]
    fresh: bool


SETTINGS = {
    "mean": Setting("the mean of each class", ("lr",), fresh=True),
    "fixed": Setting("learned for the known start", ("loss.images", "lr"), fresh=False),
    "random": Setting("learned for any start", ("loss.images", "lr"), fresh=True),
}


def estimators(config: Config) -> dict[str, Estimator]:
    return {"compiled": Adjoint(compile=config.compiled), "adjoint": adjoint, "autograd": autograd}


class Learned(NamedTuple):
    """What was learned, the loss of each meta step, and the accuracy on validation digits by meta step."""

    meta: Meta
    losses: Tensor
    accuracy: dict[int, float]


class Learner:
    """A setting being learned: a meta step for each call of `step`."""

    def __init__(
        self, config: Config, problem: Problem, setting: Setting, estimator: Estimator, generator: Generator
    ) -> None:
        self.config, self.problem, self.setting, self.generator = config, problem, setting, generator
        images = noise(generator) if "loss.images" in setting.learn else means(problem)
        meta = problem.training.init_meta(problem.start, loss={"images": images}, lr=config.lr)
        falling = torch.arange(config.meta_steps) / config.meta_steps
        falling = (1 + torch.cos(math.pi * falling)) / 2
        rates = {"loss.images": config.images_lr * falling, "hyper.lr": config.rates_lr * falling}
        moved = {name: rate for name, rate in rates.items() if name.removeprefix("hyper.") in setting.learn}
        optimizer = Scheduled(Adam(), config.meta_steps)
        self.unrolled = Unrolled(problem.training, optimizer, setting.learn, estimator, config.clip)
        self.outer_meta = self.unrolled.init_meta(meta, lr=moved)
        self.state: UnrolledState = self.unrolled.init(meta)

    def step(self) -> dict[str, Any]:
        problem = self.problem
        start = draw_start(self.config, self.generator) if self.setting.fresh else problem.start
        outer_loss = problem.outer_loss(draw_digits(self.config, problem, self.generator))
        carry = problem.training.init(start)
        self.state, info = self.unrolled.step(
            self.outer_meta, self.state, outer_loss, carry, batches(self.config)
        )
        return info


def learn(
    config: Config,
    problem: Problem,
    setting: Setting,
    estimator: Estimator,
    generator: Generator,
    tick: Callable[[str], None],
) -> Learned:
    learner = Learner(config, problem, setting, estimator, generator)
    losses, accuracy = [], {}
    for step in range(config.meta_steps):
        losses.append(learner.step()["value"])
        if (step + 1) % config.look_every == 0:
            after = learner.state.carry.params  # of the images before this step
            accuracy[step] = problem.percent(after, problem.digits.validation)
        tick(setting.label)
    return Learned(learner.state.meta, torch.stack(losses), accuracy)


def tested(config: Config, problem: Problem, meta: Meta, starts: Sequence[Params]) -> Tensor:
    """Return the accuracy on test digits, in percent, after training from each start."""
    found = []
    for start in starts:
        carry = problem.training.init(start)
        for batch in batches(config):
            carry, _ = problem.training.step(meta, carry, batch)
        found.append(problem.percent(carry.params, problem.digits.test))
    return torch.tensor(found)


def time_of(
    config: Config, problem: Problem, generator: Generator, tick: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return the seconds of a meta step by each estimator in each round."""
    runs = {
        name: Learner(config, problem, SETTINGS["fixed"], estimator, generator).step
        for name, estimator in estimators(config).items()
    }
    take_turns(runs, 1, lambda: tick("warming up"))
    return take_turns(runs, config.rounds, lambda: tick("time"))
