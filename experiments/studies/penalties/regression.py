"""Logistic regression with an L2 penalty for each weight: training, and penalties chosen and learned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy

from experiments.studies.penalties.digits import Part, Split
from metafop import Adam, Momentum, Training, functional, tree
from metafop.hypergradients import Adjoint
from metafop.optimizers import Positive
from metafop.types import Carry, Meta, Params, Tree
from metafop.unrolled import Unrolled

SHAPE = (784, 10)  # of the weights: pixels, classes


class Regression(NamedTuple):
    """A training from weights of zero, on all digits at every step; `meta` has all but the penalties."""

    training: Training
    start: Params
    meta: Meta
    steps: int

    def penalized(self, l2: Tensor) -> Meta:
        """Return meta with these penalties: one for all weights, or one for each."""
        return self.meta._replace(loss={"l2": l2})

    def trained(self, l2: Tensor, digits: Part) -> Params:
        """Return the weights and biases after training with penalties `l2`."""
        meta, carry = self.penalized(l2), self.training.init(self.start)
        for _ in range(self.steps):
            carry, _ = self.training.step(meta, carry, digits)
        return carry.params


@dataclass(frozen=True)
class Learning:
    """Penalties learned by the hypergradient of the validation loss through all of training, by Adam."""

    meta_lr: float = 0.2  # of log penalties
    meta_steps: int = 40  # of all penalties
    single_meta_steps: int = 25  # of a single one
    single_start: float = 0.03  # where the single one starts; all start from the best of the grid
    largest: float = 10.0  # penalty that may be learned: from 2 (1 + momentum) / lr on, training diverges
    compile: bool = True  # the steps that are differentiated


class Learned(NamedTuple):
    """Penalties as they were before the step of learning, `best`, with the least loss on held digits.

    validation, held: the losses at every step, after training with the penalties before it.
    """

    l2: Tensor
    best: int
    validation: Tensor
    held: Tensor


def regression(lr: float, momentum: float, steps: int) -> Regression:
    training = Training(functional.plain(loss), Momentum(), loss_domains={"l2": Positive(zero=False)})
    start = {"weight": torch.zeros(SHAPE), "bias": torch.zeros(SHAPE[1])}
    return Regression(
        training, start, training.init_meta(start, lr=lr, momentum=momentum, loss={"l2": 1.0}), steps
    )


def loss(params: Params, digits: Part, leaves: Tree) -> Tensor:
    """J(w) = cross entropy + Σ l2ᵢ wᵢ² / 2; biases have no penalty."""
    return error(params, digits) + (leaves["l2"] * params["weight"].square()).sum() / 2


def error(params: Params, digits: Part) -> Tensor:
    """Return the cross entropy, without penalties."""
    return cross_entropy(digits.images @ params["weight"] + params["bias"], digits.labels)


def accuracy(params: Params, digits: Part) -> Tensor:
    """Return the percentage of digits that are recognised."""
    scores = digits.images @ params["weight"] + params["bias"]
    return 100 * (scores.argmax(1) == digits.labels).float().mean()


def grid_losses(task: Regression, grid: Tensor, split: Split) -> Tensor:
    """Return the loss on all digits to choose by, after training with each single penalty of a grid."""
    params = vmap(lambda l2: task.trained(l2, split.training))(grid)
    return vmap(lambda params: error(params, split.chosen_by))(params)


def learn(
    task: Regression, settings: Learning, split: Split, start: Tensor, steps: int, tick: Callable[[], None]
) -> Learned:
    """Learn penalties from a `start`, as logarithms, by so many steps of Adam."""

    def bounded(meta: Meta) -> Meta:
        return meta._replace(loss=tree.map(lambda x: x.clamp(max=settings.largest), meta.loss))

    def outer_loss(carry: Carry) -> Tensor:
        return error(carry.params, split.validation)

    estimator = Adjoint(compile=settings.compile)
    learner = Unrolled(task.training, Adam(), ("loss.l2",), estimator, bounds=(bounded,))
    meta = task.penalized(start)
    outer_meta, state = learner.init_meta(meta, lr=settings.meta_lr), learner.init(meta)
    carry, batches = task.training.init(task.start), task.steps * [split.training]
    tried, validation, held = [], [], []
    for _ in range(steps):
        tried.append(state.meta.loss["l2"])
        state, info = learner.step(outer_meta, state, outer_loss, carry, batches)
        validation.append(info["value"])
        held.append(error(state.carry.params, split.held))
        tick()
    best = int(torch.stack(held).argmin())
    return Learned(tried[best], best, torch.stack(validation), torch.stack(held))
