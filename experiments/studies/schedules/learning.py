"""Schedules and the scales of the start, learned by the hypergradient through all of training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from experiments.studies.schedules import network
from experiments.studies.schedules.network import Digits, Draws
from metafop import Adam, Tasks, Training, tree
from metafop.hypergradients import Adjoint
from metafop.tensorboard import Logger
from metafop.types import Carry, Meta
from metafop.unrolled import Unrolled

PER_STEP = 4  # gradients: one ahead; going back, the same again, and two for its derivative


@dataclass(frozen=True)
class Learning:
    """By Adam, on the mean training loss after the last step, on new draws at each step of learning."""

    lr: float = 0.1  # where all learning rates start
    momentum: float = 0.9  # where all momentum starts
    meta_steps: int = 50
    meta_lr: float = 0.04  # Maclaurin's
    watch_every: int = 5  # steps of learning, for the loss on fresh draws
    compile: bool = True  # the steps that are differentiated


class Learned(NamedTuple):
    """What was learned, and the way there.

    meta: after the last step of learning.
    values: the loss before each step of learning, on the draws of that step.
    watched: what was learned after some of the steps, by their number; 0 is the start.
    """

    meta: Meta
    values: Tensor
    watched: dict[int, Meta]


def learn(
    training: Training,
    meta: Meta,
    settings: Learning,
    draws: Sequence[Draws],
    digits: Digits,
    logger: Logger,
    tick: Callable[[], None],
) -> Learned:
    """Learn from the start `meta`, on each of the draws in turn; the logger is told what each step found."""

    def outer_loss(carry: Carry, meta: Meta) -> Tensor:
        return vmap(lambda params, noise: network.loss(params, noise, digits, meta.loss)[0])(
            carry.params, carry.buffers
        ).mean()

    tasks = Tasks(training, len(draws[0].order))
    learner = Unrolled(tasks, Adam(), (*network.SCHEDULED, "loss"), Adjoint(compile=settings.compile))
    outer_meta, state = learner.init_meta(meta, lr=settings.meta_lr), learner.init(meta)
    rest = tasks.init(draws[0].at_rest)
    values, watched = [], {0: meta}
    for step, drawn in enumerate(draws, 1):
        carry, batches = rest._replace(buffers=drawn.noise), network.batches(digits, drawn)
        state, info = learner.step(outer_meta, state, outer_loss, carry, batches)
        values.append(info["value"])
        if step % settings.watch_every == 0 or step == len(draws):
            watched[step] = state.meta
        logger.info(step, info)
        tick()
    return Learned(state.meta, torch.stack(values), watched)


def numbers(meta: Meta) -> int:
    """Return how many numbers are learned."""
    scheduled = [getattr(meta.hyper, name) for name in network.SCHEDULED]
    return sum(x.numel() for x in tree.leaves((scheduled, meta.loss)))
