"""A derivative against differences of the function itself: in each number, or along random directions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from metafop.verify.differences import STEPS, Slope, slope
from metafop.verify.report import AUTOGRAD_TOLERANCE, DIFFERENCES_TOLERANCE, Row, place, relative

Values = dict[str, Tensor]  # what a function depends on, by name, in float64


class Look(NamedTuple):
    """What a derivative is along one `way`, as it is `claimed` and as differences have it."""

    way: Tensor
    size: float
    claimed: float
    found: Slope

    @property
    def gap(self) -> float:
        gap = abs(self.claimed - self.found.value)
        return math.inf if math.isnan(gap) else gap

    @property
    def error(self) -> float:
        """Their difference, relative to a size; what is not a number counts as huge."""
        if self.gap == 0:
            return 0.0
        return self.gap / self.size if math.isfinite(self.gap) else sys.float_info.max

    @property
    def is_decided(self) -> bool:
        """Whether the differences are sure enough to tell."""
        near = self.error <= DIFFERENCES_TOLERANCE
        return near or self.gap > 10 * self.found.error or not math.isfinite(self.claimed)


@dataclass(frozen=True)
class Comparison:
    """Compares derivatives of a function with differences of it, in units of each number: ∂f/∂x x.

    A number x moves to x (1 ± h), or if all of its leaf is zero to ± h.

    what: what is checked, as text.
    function: of values, by name.
    values: where it is differentiated.
    value: what it is there.
    numbers: a leaf of at most so many is looked at in each; a larger one in so many of them, drawn at random,
        and along directions that move all of its numbers: an error anywhere shows in these.
    directions: how many.
    seed: of the random draws.
    """

    what: str
    function: Callable[[Values], float]
    values: Values
    value: float
    numbers: int
    directions: int
    seed: int

    def row(self, name: str, claimed: Tensor, autograd: Tensor | None = None) -> Row:
        """Return how far the derivative `claimed` in a leaf is from differences, and from `autograd`."""
        leaf, scale = self.values[name], _scale(self.values[name])
        claimed, least = claimed * scale, 1e-3 * abs(self.value)
        looks = [self._look(name, scale, claimed, way, least) for way in self._ways(leaf)]
        for look in looks:
            self._check_decided(name, look)
        worst = max(looks, key=lambda look: look.error)
        where = self._where(name, scale, claimed, worst, least)
        by_graph = None
        if autograd is not None:
            other = autograd * scale
            sizes = torch.stack([_finite(claimed).abs(), _finite(other).abs(), torch.full_like(leaf, least)])
            off = relative(claimed, other, sizes)
            by_graph = off.max().item()
            where = place(name, off) if by_graph > AUTOGRAD_TOLERANCE else where
        along = len(looks) - min(leaf.numel(), self.numbers)
        compared = f"{len(looks) - along} of {leaf.numel()}" + (f", {along} directions" if along else "")
        return Row(self.what, name, by_graph, worst.error, compared, where)

    def _ways(self, leaf: Tensor) -> list[Tensor]:
        """Return directions of single numbers and, in a large leaf, of all of them, with random signs."""
        rng, count = Generator().manual_seed(self.seed), leaf.numel()
        single = torch.randperm(count, generator=rng)[: self.numbers].sort().values
        places = torch.arange(count)
        ways = [(places == i).to(leaf).view_as(leaf) for i in single]
        if count > self.numbers:
            signs = torch.randint(0, 2, (self.directions, *leaf.shape), generator=rng)
            ways += list(2 * signs.to(leaf) - 1)
        return ways

    def _look(self, name: str, scale: Tensor, claimed: Tensor, way: Tensor, least: float) -> Look:
        """Return the derivative along a way, `claimed` being that in each number, and by differences."""
        leaf, finite = self.values[name], _finite(claimed)
        of_one = way.count_nonzero() == 1
        size = max(least, float(finite.abs().max() if of_one else (finite * way).norm()))

        def moved(h: float) -> float:
            return self.function(self.values | {name: leaf + h * scale * way})

        found = slope(moved, enough=0.1 * DIFFERENCES_TOLERANCE * size)
        if math.isfinite(found.value):
            size = max(size, abs(found.value))
        return Look(way, size, float(torch.where(way == 0, 0.0, claimed * way).sum()), found)

    def _where(self, name: str, scale: Tensor, claimed: Tensor, worst: Look, least: float) -> str:
        """Return the number that is furthest off: in a direction that is wrong it is found by halving."""
        way = worst.way
        if way.count_nonzero() > 1 and worst.error <= DIFFERENCES_TOLERANCE:
            return f"{name}, along a direction"
        while way.count_nonzero() > 1:
            places = torch.arange(way.numel(), device=way.device).view_as(way)
            moving = places[way != 0]
            first = places < moving[len(moving) // 2]
            halves = [torch.where(first, way, 0.0), torch.where(first, 0.0, way)]
            looks = [self._look(name, scale, claimed, half, least) for half in halves]
            way = max(looks, key=lambda look: look.gap).way
        return place(name, way.abs())

    def _check_decided(self, name: str, look: Look) -> None:
        if look.is_decided:
            return
        if not math.isfinite(look.found.value):
            raise ValueError(
                f"{self.what} cannot be checked in {name!r}: next to its value the run is not finite, at "
                f"relative steps of {STEPS[0]:g} to {STEPS[-1]:g}. Check it elsewhere."
            )
        raise ValueError(
            f"{self.what} cannot be checked in {name!r}: by differences of the run its derivative is "
            f"{look.found.value:.3g} ± {look.found.error:.1g}, and {look.claimed:.3g} is claimed. Compute in "
            "float64, over fewer steps, and without kinks such as ReLU's."
        )


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def _scale(leaf: Tensor) -> Tensor:
    """Return the unit of each number: its size, and at least a thousandth of the largest in the leaf."""
    largest = leaf.abs().max()
    return torch.where(largest > 0, torch.maximum(leaf.abs(), 1e-3 * largest), 1.0)
