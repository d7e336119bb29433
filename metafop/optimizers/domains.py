"""The ranges of hyperparameters, each with the coordinate in which it is learned."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metafop.protocols import Domain


@dataclass(frozen=True)
class Positive:
    """x ≥ 0, learned as z = log x (docs/math.md, 9).

    zero: whether x may be zero; if not, x > 0 (True).
    """

    zero: bool = True

    @property
    def says(self) -> str:
        return "of zero or more" if self.zero else "above zero"

    def holds(self, value: float) -> bool:
        return self.inside(value) or (self.zero and value == 0)

    def inside(self, value: float) -> bool:
        return 0 < value < math.inf

    def coordinate(self, value: Tensor) -> Tensor:
        return value.log()

    def chain(self, value: Tensor, derivative: Tensor) -> Tensor:
        """dx/dz = x."""
        return value * derivative

    def moved(self, value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """x(z + δ) = x exp δ: no change leaves every bit as it was. It does not underflow to zero."""
        return (value * (new - old).exp()).clamp(min=torch.finfo(value.dtype).tiny)


@dataclass(frozen=True)
class Unit:
    """0 ≤ x < 1, learned as z = logit x = log(x / (1 - x)) (docs/math.md, 9)."""

    @property
    def says(self) -> str:
        return "from 0 to below 1"

    def holds(self, value: float) -> bool:
        return 0 <= value < 1

    def inside(self, value: float) -> bool:
        return 0 < value < 1

    def coordinate(self, value: Tensor) -> Tensor:
        return value.logit()

    def chain(self, value: Tensor, derivative: Tensor) -> Tensor:
        """dx/dz = x (1 - x)."""
        return value * (1 - value) * derivative

    def moved(self, value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """x(z + δ) = x + x (1 - x) e / (1 + x e), e = exp δ - 1: no change leaves every bit as it was.

        It does not round to zero or to one.
        """
        limits = torch.finfo(value.dtype)
        e = torch.expm1((new - old).clamp(max=50.0))
        moved = value + value * (1 - value) * e / (1 + value * e)
        return moved.clamp(min=limits.tiny, max=1 - limits.eps)


@dataclass(frozen=True)
class Free:
    """Any x, learned as it is."""

    @property
    def says(self) -> str:
        return "of any finite size"

    def holds(self, value: float) -> bool:
        return math.isfinite(value)

    def inside(self, value: float) -> bool:
        return math.isfinite(value)

    def coordinate(self, value: Tensor) -> Tensor:
        return value

    def chain(self, value: Tensor, derivative: Tensor) -> Tensor:
        return derivative

    def moved(self, value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        return new


@dataclass(frozen=True)
class Timed:
    """A schedule: x_0 … x_(T-1), T = `steps`, each in the same `domain`, learned in its coordinate."""

    domain: Domain
    steps: int

    @property
    def says(self) -> str:
        return self.domain.says

    def holds(self, value: float) -> bool:
        return self.domain.holds(value)

    def inside(self, value: float) -> bool:
        return self.domain.inside(value)

    def coordinate(self, value: Tensor) -> Tensor:
        return self.domain.coordinate(value)

    def chain(self, value: Tensor, derivative: Tensor) -> Tensor:
        return self.domain.chain(value, derivative)

    def moved(self, value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        return self.domain.moved(value, old, new)
