"""Runs that learn weights and may spend so many gradients, and networks that are trained anew."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from experiments.studies.cleaning.methods import Learned
from experiments.studies.cleaning.problem import (
    L2,
    MOMENTUM,
    Batch,
    Digits,
    Problem,
    accuracy,
    f1,
    weighted,
)
from metafop import Momentum, Training, functional
from metafop.types import Params

MARKS = 40  # at which a run is looked at
EVERY = 10  # steps, after which a network that is trained anew is validated


class Run(NamedTuple):
    """A method's run: test accuracy and F1 at each mark of its budget, NaN before its first step; its end."""

    accuracies: Tensor  # (MARKS + 1,), from nothing spent to all
    f1s: Tensor
    weights: Tensor
    validation: float
    steps: int
    spent: float
    seconds: float  # of all cores

    @property
    def accuracy(self) -> float:
        return self.accuracies[-1].item()

    @property
    def f1(self) -> float:
        return self.f1s[-1].item()


def learned(method: Iterator[Learned], problem: Problem, gradients: int) -> Run:
    """Let a method take steps for as long as the next one fits into its budget."""
    unit, digits, last = gradient_flops(problem), problem.digits, Learned({}, torch.tensor([]))
    spent, seconds, steps, mark = 0.0, 0.0, 0, -1
    accuracies, f1s = torch.full((2, MARKS + 1), torch.nan, dtype=torch.float64)
    while steps == 0 or spent * (steps + 1) / steps <= gradients:
        began = time.process_time()
        with FlopCounterMode(display=False) as counter:
            last = next(method)
        seconds += time.process_time() - began
        spent, steps = spent + counter.get_total_flops() / unit, steps + 1
        if int(MARKS * spent / gradients) > mark:
            mark = int(MARKS * spent / gradients)
            accuracies[mark:], f1s[mark:] = measured(last, digits)
    accuracies[-1], f1s[-1] = measured(last, digits)
    validation = accuracy(last.params, digits.validation)
    return Run(accuracies, f1s, last.weights, validation, steps, spent, seconds)


def measured(learned: Learned, digits: Digits) -> tuple[float, float]:
    """Return the test accuracy of the network and the F1 of the weights."""
    return accuracy(learned.params, digits.test), f1(learned.weights, digits.wrong)


def gradient_flops(problem: Problem) -> int:
    """Return the multiplications and additions of a gradient on all training digits."""
    with FlopCounterMode(display=False) as counter:
        problem.training.evaluate(problem.meta, problem.carry, problem.digits.training)
    return counter.get_total_flops()


class Anew(NamedTuple):
    """A network trained anew: test accuracy in the end, and where validation accuracy was best on the way."""

    accuracy: float
    stopped: float


class OfSeed(NamedTuple):
    """What the digits and the network of a seed led to, by method and by what a network was trained on."""

    digits: Digits
    learned: dict[str, Run]
    anew: dict[str, Anew]


def anew(problem: Problem, weights: Tensor, lr: float, steps: int) -> dict[str, Anew]:
    """Train on several sets of digits from the same start, each as long; `weights` are what was learned."""
    digits, params = problem.digits, problem.carry.params
    (images, labels), validation, right = digits.training, digits.validation, ~digits.wrong
    half, ones = (images[right], labels[right]), torch.ones(len(labels))
    sets = {
        "all": ([digits.training], [ones]),
        "right": ([half], [ones[right]]),
        "learned": ([digits.training], [weights]),
        "validation": ([validation], [ones]),
        "right_and_validation": ([half, validation], [ones[right], ones]),
        "learned_and_validation": ([digits.training, validation], [weights, ones]),
    }
    return {name: trained(digits, params, *together(*each), lr, steps) for name, each in sets.items()}


def together(batches: list[Batch], weights: list[Tensor]) -> tuple[Batch, Tensor]:
    """Return several sets as one, with weights of mean one."""
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    joined = torch.cat(weights)
    return (images, labels), joined / joined.mean()


def trained(digits: Digits, params: Params, batch: Batch, weights: Tensor, lr: float, steps: int) -> Anew:
    training = Training(functional.plain(weighted), Momentum())
    leaves = {"weights": weights, "l2": L2}
    meta, carry = training.init_meta(params, lr=lr, momentum=MOMENTUM, loss=leaves), training.init(params)
    best, stopped = 0.0, 0.0
    for step in range(1, steps + 1):
        carry, _ = training.step(meta, carry, batch)
        if step % EVERY == 0 or step == steps:
            validated = accuracy(carry.params, digits.validation)
            if validated > best:
                best, stopped = validated, accuracy(carry.params, digits.test)
    return Anew(accuracy(carry.params, digits.test), stopped)
