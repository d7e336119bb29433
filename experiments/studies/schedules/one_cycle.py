"""Random one-cycle schedules (Smith, 2018), and the loss after training with each."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from experiments.studies.schedules.network import Digits, Draws, losses, trained
from metafop import Training, tree
from metafop.types import Meta

PEAKS = (0.02, 2.0)  # learning rates
FINAL = (1.0, 1000.0)  # the peak over the last learning rate
DAMPING = (0.01, 0.5)  # 1 - momentum
BEGIN = 25.0  # the peak over the first learning rate, as in torch
CHUNK = 10  # schedules that are trained with together


class OneCycles(NamedTuple):
    """Learning rates that rise to `peak` in a fraction `warm_up` of the steps, then fall to `peak / final`.

    Both along half a cosine; momentum is constant. A tensor each, with an entry for each schedule.
    """

    peak: Tensor
    warm_up: Tensor
    final: Tensor
    momentum: Tensor

    def lrs(self, steps: int) -> Tensor:
        """Return the learning rates: (schedules, steps)."""
        at = (torch.arange(steps) + 0.5) / steps
        peak, warm_up, final = (x[:, None] for x in (self.peak, self.warm_up, self.final))
        up = between(peak / BEGIN, peak, at / warm_up)
        down = between(peak, peak / final, (at - warm_up) / (1 - warm_up))
        return torch.where(at < warm_up, up, down)


class Chosen(NamedTuple):
    """The best of random schedules: as meta, by its numbers; and the mean losses of all of them."""

    meta: Meta
    schedule: OneCycles
    losses: Tensor


def between(first: Tensor, last: Tensor, progress: Tensor) -> Tensor:
    return last + (first - last) * (1 + (math.pi * progress).cos()) / 2


def random(count: int, generator: Generator) -> OneCycles:
    """Return random schedules: peak, division and 1 - momentum log-uniform, the warm-up up to a half."""
    uniform = torch.rand(4, count, generator=generator)

    def log_uniform(x: Tensor, low: float, high: float) -> Tensor:
        return low * (high / low) ** x

    return OneCycles(
        peak=log_uniform(uniform[0], *PEAKS),
        warm_up=0.5 * uniform[1],
        final=log_uniform(uniform[2], *FINAL),
        momentum=1 - log_uniform(uniform[3], *DAMPING),
    )


def metas(meta: Meta, schedules: OneCycles) -> Meta:
    """Return `meta` with each of the schedules in turn for all parameters, stacked."""
    [steps] = {len(lrs) for lrs in meta.hyper.lr.values()}
    lr = dict.fromkeys(meta.hyper.lr, schedules.lrs(steps))
    momentum = dict.fromkeys(meta.hyper.momentum, schedules.momentum[:, None].expand(-1, steps))
    count = len(schedules.peak)
    same = tree.map(lambda x: x.expand(count, *x.shape), meta)
    return same._replace(hyper=same.hyper._replace(lr=lr, momentum=momentum))


def chosen(
    training: Training,
    meta: Meta,
    schedules: OneCycles,
    draws: Draws,
    digits: Digits,
    tick: Callable[[], None],
) -> Chosen:
    """Train with every schedule on the same draws, and return the one with the least mean loss."""
    every, found = metas(meta, schedules), []
    for start in range(0, len(schedules.peak), CHUNK):
        some = tree.map(lambda x, start=start: x[start : start + CHUNK], every)
        found.append(losses(some, trained(training, some, draws, digits), digits).mean(0))
        tick()
    by_schedule = torch.cat(found)
    best = int(by_schedule.nan_to_num(math.inf).argmin())
    return Chosen(tree.map(lambda x: x[best], every), tree.map(lambda x: x[best], schedules), by_schedule)
