"""Methods to train a small network: hyperparameters fixed, learned online, or learned by unrolling."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap

from experiments.studies.compare.digits import Digits
from metafop import Adam, Carry, Meta, Momentum, Online, Scheduled, Training, Unrolled, assign, tree
from metafop.meta_training import meta_train
from metafop.progress import Line
from metafop.protocols import Trains
from metafop.types import Loss


class Method(NamedTuple):
    """A learner; and, stacked for many networks, its meta and the state to start from.

    `lr` gives the learning rates of a step, from the meta, the state before it and its number.
    """

    learner: Trains
    meta: Meta
    state: Any
    lr: Callable[[Meta, Any, int], Tensor]


def fixed(digits: Digits, networks: Tensor, lrs: Tensor) -> Method:
    """Momentum with a learning rate for each network."""
    training = Training(digits.loss, Momentum())
    metas = [training.init_meta(digits.take(networks[0]), lr=lr) for lr in lrs.tolist()]
    carry = vmap(training.init)(digits.take(networks))
    return Method(training, tree.stack(metas), carry, lambda meta, state, t: meta.hyper.lr)


def online(digits: Digits, networks: Tensor, meta_lrs: Tensor, lr: float, learn: tuple[str, ...]) -> Method:
    """Momentum whose hyperparameters (and P, if named) each network learns for itself while it is trained."""
    families = assign(digits.take(networks[0])) if "precond" in learn else {}
    training = Training(digits.loss, Momentum(), families)
    learner = Online(training, Adam(), learn)
    outer_metas, states = [], []
    for number, meta_lr in zip(networks, meta_lrs.tolist(), strict=True):
        params, generator = digits.take(number), Generator().manual_seed(int(number))
        meta = training.init_meta(params, generator, lr=lr)
        outer_metas.append(learner.init_meta(meta, lr=meta_lr))
        states.append(learner.init(meta, training.init(params)))
    return Method(
        learner, tree.stack(outer_metas), tree.stack(states), lambda meta, state, t: state.meta.hyper.lr
    )


def scheduled(digits: Digits, networks: Tensor, schedules: Tensor) -> Method:
    """Momentum with a schedule of learning rates for each network, the last of which stays."""
    horizon = schedules.shape[1]
    training = Training(digits.loss, Scheduled(Momentum(), horizon))
    metas = [training.init_meta(digits.take(networks[0]), lr=schedule) for schedule in schedules]
    carry = vmap(training.init)(digits.take(networks))
    return Method(
        training, tree.stack(metas), carry, lambda meta, state, t: meta.hyper.lr[:, min(t, horizon - 1)]
    )


def falling(digits: Digits, networks: Tensor, lrs: Tensor, horizon: int) -> Method:
    """Momentum with a learning rate for each network that falls in a line, to nothing after the horizon."""
    left = 1 - torch.arange(horizon, dtype=lrs.dtype) / horizon
    return scheduled(digits, networks, lrs[:, None] * left)


@dataclass(frozen=True)
class Networks:
    """The task of learning a schedule: in each episode, some networks are trained from the start.

    They take turns, and see new batches in every episode. What counts is their validation loss in the end.
    """

    digits: Digits
    networks: int  # in all
    together: int  # in an episode
    horizon: int
    batch: int
    seed: int

    @property
    def training(self) -> Training:
        return Training(summed(self.digits.loss), Scheduled(Momentum(), self.horizon))

    def start(self, episode: int) -> Carry:
        numbers = torch.arange(self.together) + episode * self.together
        return self.training.init(self.digits.take(numbers % self.networks))

    def batches(self, episode: int, window: int) -> list[Tensor]:
        generator = Generator().manual_seed(self.seed + episode)
        return list(self.digits.draw((self.horizon, self.together, self.batch), generator))

    def outer_loss(self, episode: int, window: int) -> Callable[[Carry], Tensor]:
        def mean(carry: Carry) -> Tensor:
            return vmap(lambda params: self.digits.validation(Carry(params, (), {})))(carry.params).mean()

        return mean


def summed(loss: Loss) -> Loss:
    """Return the losses of many networks, summed: each moves as if it were alone."""

    def total(params: Any, buffers: Any, batch: Any) -> Any:
        return vmap(lambda params, batch: loss(params, buffers, batch)[0])(params, batch).sum(), buffers

    return total


def learn_schedule(task: Networks, lr: float, meta_lr: float, steps: int, folder: Path) -> Tensor:
    """Return a learning rate for every step of the horizon, learned through all of it."""
    learner = Unrolled(task.training, Adam())
    meta = task.training.init_meta(task.start(0).params, lr=lr)
    outer_meta = learner.init_meta(meta, lr=meta_lr)
    return meta_train(
        learner, outer_meta, meta, task, steps, folder=folder, progress=Line()
    ).state.meta.hyper.lr
