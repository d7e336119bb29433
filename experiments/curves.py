"""What training gains from hyperparameters that are fixed, learned online, or learned through many steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Generator, Tensor
from torch.func import vmap

from experiments import run
from experiments.digits import Digits
from metafop import Adam, Carry, Meta, Momentum, Online, Training, assign, tree
from metafop.meta_training import Trained, meta_train
from metafop.optimizers.scheduled import Scheduled
from metafop.tensorboard import Logger
from metafop.types import Loss
from metafop.unrolled import Unrolled


@dataclass(frozen=True)
class Curves:
    """Momentum 0.9 with a learning rate that is fixed, tuned, learned online, or learned by unrolling.

    What is chosen or learned beforehand is so on some networks, by their validation loss after `horizon` steps;
    then all methods train fresh networks, on the same batches.
    """

    lr: float = 0.01  # where every method but the tuned one starts: too small
    lrs: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)  # to choose the tuned one from
    meta_lrs: tuple[float, ...] = (0.01, 0.03, 0.1)  # of Adam online, to choose from
    meta_lr: float = 0.1  # of Adam through the horizon, not tuned
    meta_steps: int = 40  # each through the horizon
    horizon: int = 100  # steps that are unrolled
    together: int = 4  # networks that a meta step is averaged over
    tuning: int = 16  # networks to learn and choose on
    fresh: int = 16  # networks to report on
    steps: int = 300  # of training
    batch: int = 64  # images in a batch


class Start(NamedTuple):
    """Who takes the steps, and for each lane what steers it and where it starts.

    `lr` tells the learning rate at a time from what steers and the state.
    """

    learner: Training | Online
    steer: Meta
    state: Any
    lr: Callable[[Meta, Any, int], Tensor]


class Curve(NamedTuple):
    """Loss on the batch, test loss, and learning rate before each step: (steps, lanes)."""

    training: Tensor
    test: Tensor
    lrs: Tensor


class Method(NamedTuple):
    """A curve for fresh networks, and what was spent beforehand."""

    curve: Curve
    chosen: str
    gradients: int
    products: int  # Hessian-vector products


METHODS = {  # by name in the summary: the label, and a colour of Okabe and Ito's, for the colour-blind
    "fixed": ("fixed lr, untuned", "#999999"),
    "tuned": ("fixed lr, tuned", "black"),
    "online": ("online: lr", "#E69F00"),
    "online_all": ("online: lr, decay, M", "#CC79A7"),
    "unrolled": ("unrolled: lr schedule", "#0072B2"),
}


def fixed(digits: Digits, lanes: Tensor, lrs: Tensor) -> Start:
    training, params = Training(digits.loss, Momentum()), digits.take(lanes)
    metas = [training.meta(digits.take(lanes[0]), Momentum().hyper(lr=lr)) for lr in lrs.tolist()]
    return Start(training, tree.stack(metas), vmap(training.init)(params), lambda steer, state, t: steer.hyper.lr)


def online(digits: Digits, lanes: Tensor, lr: float, meta_lrs: Tensor, learn: tuple[str, ...]) -> Start:
    """Return learners of a learning rate for each lane, P being learned if named."""
    families = assign(digits.take(lanes[0])) if "precond" in learn else {}
    training = Training(digits.loss, Momentum(), families)
    learner = Online(training, Adam(), learn)
    metas, steers = [], []
    for lane, meta_lr in zip(lanes, meta_lrs.tolist(), strict=True):
        generator = Generator().manual_seed(int(lane))
        metas.append(training.meta(digits.take(lane), Momentum().hyper(lr=lr), generator))
        steers.append(learner.meta(metas[-1], Adam().hyper(lr=meta_lr)))
    state = vmap(lambda meta, params: learner.init(meta, training.init(params)))(
        tree.stack(metas), digits.take(lanes)
    )
    return Start(learner, tree.stack(steers), state, lambda steer, state, t: state.meta.hyper.lr)


def scheduled(digits: Digits, lanes: Tensor, meta: Meta) -> Start:
    training = Training(digits.loss, Scheduled(Momentum()))
    hyper = tree.map(lambda x: x.expand(len(lanes), *x.shape), meta.hyper)
    steer = Meta(hyper, {k: () for k in digits.networks})
    last = meta.hyper.lr.shape[0] - 1
    return Start(
        training,
        steer,
        vmap(training.init)(digits.take(lanes)),
        lambda steer, state, t: steer.hyper.lr[:, min(t, last)],
    )


def follow(start: Start, digits: Digits, order: Tensor, tick: Callable[[], None]) -> tuple[Any, Curve]:
    """Train all lanes, (lanes, steps, batch); return the state after, and the curves."""
    state, found = start.state, ([], [], [])
    for t in range(order.shape[1]):
        found[1].append(vmap(digits.test)(state))
        found[2].append(start.lr(start.steer, state, t))
        state, info = vmap(start.learner.step)(start.steer, state, order[:, t])
        found[0].append(info["value"])
        tick()
    return state, Curve(*(torch.stack(x) for x in found))


def together(loss: Loss) -> Loss:
    """Return the losses of many networks, summed: each moves as if it were alone."""

    def total(params: Any, buffers: Any, batch: Any) -> Any:
        return vmap(lambda params, batch: loss(params, buffers, batch)[0])(params, batch).sum(), buffers

    return total


@dataclass(frozen=True)
class Networks:
    """The task of learning a schedule: episodes of a few networks at a time, in turn, on batches of their own."""

    settings: Curves
    seed: int
    digits: Digits = field(repr=False)

    @property
    def training(self) -> Training:
        return Training(together(self.digits.loss), Scheduled(Momentum()))

    def start(self, episode: int) -> Carry:
        numbers = torch.arange(self.settings.together) + episode * self.settings.together
        return self.training.init(self.digits.take(numbers % self.settings.tuning))

    def batches(self, episode: int, window: int) -> Tensor:
        shape = (self.settings.horizon, self.settings.together, self.settings.batch)
        return self.digits.draw(shape, Generator().manual_seed(self.seed + episode))

    def outer_loss(self, episode: int, window: int) -> Callable[[Carry], Tensor]:
        def mean(carry: Carry) -> Tensor:
            return vmap(lambda params: self.digits.validation(Carry(params, (), {})))(carry.params).mean()

        return mean
