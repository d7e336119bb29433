"""Tests that an estimate must pass before anything is learned from it: for `Unrolled(trust=…)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from metafop.diagnostics.trust import halves, metasmoothness
from metafop.protocols import Batches, Estimator, Trains
from metafop.types import Estimate, Meta, OuterLoss


class Estimated(NamedTuple):
    """An estimate, and all that it was made from.

    estimator: what made it.
    training, outer_loss, meta, carry, batches: what the estimator was given.
    learn: names of the leaves of meta that are learned from it, or the starts of some.
    estimate: what it returned.
    """

    estimator: Estimator
    training: Trains
    outer_loss: OuterLoss
    meta: Meta
    carry: Any
    batches: Batches
    learn: tuple[str, ...]
    estimate: Estimate


class Verdict(NamedTuple):
    """What a test found.

    name: the test's, in info.
    passed: whether the estimate passed, a boolean tensor.
    measured: the number that was measured.
    asked: what it was to be, in words, such as "at least 0.8".
    """

    name: str
    passed: Tensor
    measured: Tensor
    asked: str


class TrustTest(Protocol):
    """What decides whether to learn from an estimate."""

    def __call__(self, estimated: Estimated, /) -> Verdict:
        """Return what is found of what was `estimated`."""
        ...


@dataclass(frozen=True)
class Metasmooth:
    """Passed if training is smooth in meta: `diagnostics.metasmoothness` of at least so much.

    It takes three trainings more.

    at_least: from -1 to 1: 1 is smooth, 0 is chance (0.5).
    h: how far meta is moved, in the coordinates in which it is learned (0.01).
    """

    at_least: float = 0.5
    h: float = 0.01

    def __post_init__(self) -> None:
        _check_cosine("Metasmooth", self.at_least)

    def __call__(self, estimated: Estimated, /) -> Verdict:
        """Return what is found of what was `estimated`."""
        _, training, _, meta, carry, batches, learn, _ = estimated
        found = metasmoothness(training, meta, carry, batches, learn, self.h)["metasmoothness"]
        return _at_least("metasmoothness", found, self.at_least)


@dataclass(frozen=True)
class HalvesAgree:
    """Passed if the hypergradients of every second batch agree: their cosine, by `diagnostics.halves`.

    It takes one estimate more, in two halves.

    at_least: from -1 to 1: 1 is agreement, 0 is chance (0.1).
    """

    at_least: float = 0.1

    def __post_init__(self) -> None:
        _check_cosine("HalvesAgree", self.at_least)

    def __call__(self, estimated: Estimated, /) -> Verdict:
        """Return what is found of what was `estimated`."""
        estimator, training, outer_loss, meta, carry, batches, learn, _ = estimated
        found = halves(estimator, training, outer_loss, meta, carry, batches, learn)["cosine"]
        return _at_least("halves", found, self.at_least)


@dataclass(frozen=True)
class Solved:
    """Passed if the linear equation of `Implicit` was solved: `info["residual"]`, which costs nothing.

    at_most: the residual relative to the right-hand side (1e-3).
    """

    at_most: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive("Solved", self.at_most)

    def __call__(self, estimated: Estimated, /) -> Verdict:
        """Return what is found of what was `estimated`."""
        return _told(self, "residual", estimated, self.at_most, "Implicit")


@dataclass(frozen=True)
class AtMinimum:
    """Passed if a run has ended near a minimum of its loss: `info["distance"]` of `Implicit`.

    at_most: how far a minimum is along the gradient, relative to the size of the parameters (0.01).
    """

    at_most: float = 0.01

    def __post_init__(self) -> None:
        _check_positive("AtMinimum", self.at_most)

    def __call__(self, estimated: Estimated, /) -> Verdict:
        """Return what is found of what was `estimated`."""
        return _told(self, "distance", estimated, self.at_most, "Implicit")


@dataclass(frozen=True)
class GrowsSlowly:
    """Passed if ∂value/∂carry does not explode on the way back: `info["growth"]`, which costs nothing.

    at_most: the factor by which it may grow in a step back, on average (1.05).
    """

    at_most: float = 1.05

    def __post_init__(self) -> None:
        _check_positive("GrowsSlowly", self.at_most)

    def __call__(self, estimated: Estimated, /) -> Verdict:
        """Return what is found of what was `estimated`."""
        return _told(self, "growth", estimated, self.at_most, "Adjoint")


def _told(test: TrustTest, name: str, estimated: Estimated, most: float, estimator: str) -> Verdict:
    """Return what the estimator itself has told; NaN, which is smaller than nothing, does not pass."""
    info = estimated.estimate.info
    if name not in info:
        raise ValueError(
            f"{test} reads info[{name!r}], which {estimated.estimator} does not tell. Learn with {estimator} "
            "or pass another test."
        )
    return Verdict(name, info[name] <= most, info[name], f"at most {most:g}")


def _at_least(name: str, measured: Tensor, least: float) -> Verdict:
    """NaN, which is larger than nothing, does not pass."""
    return Verdict(name, torch.as_tensor(measured >= least), measured, f"at least {least:g}")


def _check_cosine(owner: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1 <= value <= 1:
        raise ValueError(f"{owner} takes at_least from -1 to 1, got {value!r}. Pass one such as 0.5.")


def _check_positive(owner: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{owner} takes at_most above zero, got {value!r}. Pass one such as 0.01.")
