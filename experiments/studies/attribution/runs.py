"""What a seed or a learning rate led to: derivatives, and losses after training without some digits."""

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Generator, Tensor

from experiments.data import Dataset
from experiments.studies.attribution.config import Config
from experiments.studies.attribution.influences import (
    by_method,
    correlations,
    influences,
    metasmoothness,
    predicted,
    subsets,
)
from experiments.studies.attribution.problem import Problem, accuracy, losses, problem, retrained, trained
from metafop.hypergradients import adjoint

T = TypeVar("T")


class OfSeed(NamedTuple):
    """What each method predicts and what happens, as the change of each unseen digit's loss.

    Changes are (shares, subsets, unseen); times are of all cores.
    """

    problem: Problem
    influence: dict[str, Tensor]  # (unseen, examples)
    predicted: dict[str, Tensor]
    changes: Tensor
    accuracy: float
    seconds: dict[str, float]

    def correlations(self, method: str) -> Tensor:
        """Return those of a method, (shares, unseen)."""
        return torch.stack(
            [correlations(*each) for each in zip(self.predicted[method], self.changes, strict=True)]
        )

    def correlations_of_mean(self, method: str) -> Tensor:
        """Return those of the mean loss of the unseen digits, (shares,)."""
        means = (changes.mean(-1, keepdim=True) for changes in (self.predicted[method], self.changes))
        return torch.cat([correlations(*each) for each in zip(*means, strict=True)])

    def slopes(self, method: str) -> Tensor:
        """Return by what factor predictions are best scaled, (shares,): Σ predicted · true / Σ predicted²."""
        guesses = self.predicted[method]
        return (guesses * self.changes).sum((1, 2)) / guesses.square().sum((1, 2))


class OfRate(NamedTuple):
    """What a learning rate led to; the correlations are the adjoint's, of each unseen digit."""

    lr: float
    accuracy: float
    metasmoothness: float
    correlations: Tensor


def of_seed(config: Config, dataset: Dataset, seed: int, doing: Callable[[str], None]) -> OfSeed:
    generator, seconds = Generator().manual_seed(seed), {}
    own = start(config, dataset, config.lr, generator)
    doing(f"seed {seed}: derivatives")
    seconds["training"], carry = timed(lambda: trained(own))
    seconds["adjoint"], _ = timed(lambda: influences(own, adjoint, own.carry, own.batches))
    influence = by_method(own, carry)
    weights = torch.stack(
        [subsets(config.examples, share, config.subsets, generator) for share in config.dropped]
    )
    changes = []
    for share, dropped in zip(config.dropped, weights, strict=True):
        doing(f"seed {seed}: trained again without {share:.0%}")
        seconds["retraining"], after = timed(lambda dropped=dropped: retrained(own, dropped))
        changes.append(after - losses(carry.params, own.unseen))
    return OfSeed(
        problem=own,
        influence=influence,
        predicted={name: predicted(found, weights) for name, found in influence.items()},
        changes=torch.stack(changes),
        accuracy=accuracy(carry.params, own.test),
        seconds=seconds,
    )


def of_rate(config: Config, dataset: Dataset, lr: float) -> OfRate:
    generator = Generator().manual_seed(config.seed)
    own = start(config, dataset, lr, generator)
    weights = subsets(config.examples, config.dropped_by_lr, config.subsets, generator)
    influence = influences(own, adjoint, own.carry, own.batches)
    return OfRate(
        lr,
        accuracy(trained(own).params, own.test),
        metasmoothness(own, weights[0]),
        correlations(predicted(influence, weights), retrained(own, weights)),
    )


def start(config: Config, dataset: Dataset, lr: float, generator: Generator) -> Problem:
    return problem(dataset, config.examples, config.unseen, config.epochs, lr, generator)


def timed(function: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    result = function()
    return time.process_time() - began, result
