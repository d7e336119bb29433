"""What is learned by each recipe, and how well a network then adapts to tasks that it has not seen."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import functional_call, vmap

from experiments.studies.maml.config import Config
from experiments.studies.maml.sinusoids import REACH, Examples, Problem, draw_episode, draw_sinusoids
from experiments.studies.maml.ways import INNER_LR, META_LR, Ours
from metafop import Meta, Tasks
from metafop.hypergradients import Adjoint
from metafop.protocols import Estimator
from metafop.types import Params

GRID = 100  # points at which a sinusoid is compared with what a network makes of it
RATE_LR = 1e-2  # of Adam on the logarithms of inner learning rates


@dataclass(frozen=True)
class Recipe:
    """What is learned, through how many steps; a rate of zero learns a start from which nobody adapts."""

    label: str
    steps: int
    lr: float = INNER_LR
    learn: tuple[str, ...] = ("start",)

    def way(self, problem: Problem, estimator: Estimator) -> Ours:
        """Return the loop; where rates are learned, each tensor of the network has its own."""
        if "lr" not in self.learn:
            return Ours(problem, self.steps, estimator, lr=self.lr)
        rates, meta_lr = dict.fromkeys(problem.start, self.lr), {"start.*": META_LR, "hyper.lr.*": RATE_LR}
        return Ours(problem, self.steps, estimator, self.learn, rates, meta_lr)


RECIPES = {
    "joint": Recipe("one network for all tasks", 1, lr=0.0),
    "maml1": Recipe("start, 1 step", 1),
    "maml5": Recipe("start, 5 steps", 5),
    "rates1": Recipe("start and rates, 1 step", 1, learn=("start", "lr")),
}


class Learned(NamedTuple):
    """The loss and the seconds of each meta step, the start that was learned, and the meta to adapt with."""

    losses: Tensor
    seconds: list[float]
    start: Params
    meta: Meta


class Unseen(NamedTuple):
    """Tasks to adapt to: the points that a network sees, and whole sinusoids to compare it with."""

    seen: Examples
    whole: Examples


class Adapted(NamedTuple):
    """What networks make of unseen tasks after 0, 1, … steps: (steps + 1, tasks, points), and the errors."""

    curves: Tensor
    errors: Tensor  # squared, the mean of each task: (steps + 1, tasks)


def learn(config: Config, problem: Problem, recipe: Recipe, tick: Callable[[str], None]) -> Learned:
    """Learn from new tasks at every meta step, the same ones for every recipe."""
    way, losses, seconds = recipe.way(problem, Adjoint(compile=config.compiled)), [], []
    generator = Generator().manual_seed(config.seed)
    for _ in range(config.meta_steps):
        episode, begin = draw_episode(config.tasks, config.shots, generator), time.perf_counter()
        losses.append(way.step(episode))
        seconds.append(time.perf_counter() - begin)
        tick(recipe.label)
    start, meta = way.start, way.state.meta
    if recipe.lr == 0:  # what was not to adapt while it was learned does so now
        meta = problem.tasks.training.init_meta(start, lr=INNER_LR)
    return Learned(torch.stack(losses), seconds, start, meta)


def unseen_tasks(count: int, shots: int, generator: Generator) -> Unseen:
    sinusoids = draw_sinusoids(count, generator)
    grid = torch.linspace(-REACH, REACH, GRID)[:, None].expand(count, GRID, 1)
    return Unseen(sinusoids.drawn(shots, generator), sinusoids.at(grid))


def adapt(problem: Problem, learned: Learned, unseen: Unseen, steps: int) -> Adapted:
    """Adapt to every task by itself, from the start that was learned."""
    x, y = unseen.whole
    tasks = Tasks(problem.tasks.training, len(x))

    def predicted(params: Params, x: Tensor) -> Tensor:
        return functional_call(problem.network, params, (x,))

    carry, curves = tasks.init(learned.start), []
    for step in range(steps + 1):
        curves.append(vmap(predicted)(carry.params, x).detach())
        if step < steps:
            carry, _ = tasks.step(learned.meta, carry, unseen.seen)
    found = torch.stack(curves)
    return Adapted(found.squeeze(-1), (found - y).square().mean((2, 3)))
