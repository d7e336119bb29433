"""Solving A x = b for a square A that is known by its products with vectors: what `Implicit` asks for."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor

from metafop import tree

Product = Callable[[Tensor], Tensor]  # v ↦ A v


class Solution(NamedTuple):
    """What a solver found.

    x: the solution, a vector.
    residual: ‖b - A x‖ / ‖b‖; zero where b is.
    iterations: how many products with A its iterations took.
    negative_curvature: whether ⟨p, A p⟩ < 0 for a p on the way.
    singular: whether A p is zero to rounding for a p on the way along which b is not.
    """

    x: Tensor
    residual: Tensor
    iterations: Tensor
    negative_curvature: Tensor
    singular: Tensor


class LinearSolver(Protocol):
    """A way to solve A x = b."""

    @property
    def symmetric(self) -> bool:
        """Whether it is right for a symmetric A alone."""
        ...

    @property
    def iterations(self) -> int:
        """How many products with A its iterations take at most."""
        ...

    def __call__(self, product: Product, b: Tensor) -> Solution:
        """Return x of A x = `b`, where `product(v)` is A v."""
        ...


@dataclass(frozen=True)
class ConjugateGradients:
    """Conjugate gradients (Hestenes & Stiefel, 1952), for a symmetric A whose curvature is positive.

    a = ⟨r, z⟩ / ⟨p, A p⟩,    x' = x + a p,    r' = r - a A p,    z' = r' / D,    p' = z' + ⟨r', z'⟩ / ⟨r, z⟩
    p

    It starts from x = 0 and ends at the first of: ‖r‖ ≤ `tolerance` ‖b‖; a p along which the curvature is not
    positive; so many `iterations`. D is one, or an estimate of |diag A| (Bekas, Kokiopoulou & Saad, 2007).
    (docs/math.md, 29)

    iterations: the most to take (1000).
    tolerance: of ‖r‖ / ‖b‖ (None, a hundred times the rounding of b's type).
    probes: how many random vectors of signs, a product with A for each, the diagonal is estimated from (0, D
        is one). It pays where the scales of parameters differ much.
    seed: of the random vectors (0).

    >>> A, b = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([3.0, 4.0])
    >>> metafop.hypergradients.ConjugateGradients()(lambda v: A @ v, b).x.round(decimals=4)
    tensor([1., 1.])
    """

    iterations: int = 1000
    tolerance: float | None = None
    probes: int = 0
    seed: int = 0

    @property
    def symmetric(self) -> bool:
        return True

    def __post_init__(self) -> None:
        _check_iterations("ConjugateGradients", self.iterations)
        if self.tolerance is not None and not _is_number(self.tolerance, above=0):
            raise ValueError(
                f"ConjugateGradients takes a tolerance above zero, got {self.tolerance!r}. Pass one such as "
                "1e-6."
            )
        if isinstance(self.probes, bool) or not isinstance(self.probes, int) or self.probes < 0:
            raise ValueError(
                f"ConjugateGradients takes a number of probes of zero or more, got {self.probes!r}. "
                "Pass an integer, such as 20."
            )

    def __call__(self, product: Product, b: Tensor) -> Solution:
        """Return x of A x = `b`, where `product(v)` is A v."""
        eps = torch.finfo(b.dtype).eps
        allowed = (100 * eps if self.tolerance is None else self.tolerance) * b.norm()
        scale = self._diagonal(product, b)
        x, r = torch.zeros_like(b), b
        z = r / scale
        p, size = z, r @ z
        going, taken = r.norm() > allowed, torch.zeros_like(size)
        largest, negative, singular = taken, torch.zeros_like(going), torch.zeros_like(going)
        for _ in range(self.iterations):
            if tree.is_surely(~going):
                break
            along = product(p)
            curvature, square = p @ along, p @ p
            largest = torch.where(going, torch.maximum(largest, (curvature / square).abs()), largest)
            flat = curvature.abs() <= 10 * eps * largest * square
            singular = singular | (going & flat)
            negative = negative | (going & ~flat & (curvature < 0))
            taken = taken + going
            going = going & ~flat & (curvature > 0)
            step = torch.where(going, size / torch.where(going, curvature, 1.0), 0.0)
            x, r = x + step * p, r - step * along
            z = r / scale
            size, before = torch.where(going, r @ z, size), size
            p = torch.where(going, z + size / torch.where(before > 0, before, 1.0) * p, p)
            going = going & (r.norm() > allowed)
        return Solution(x, _relative(b - product(x), b), taken, negative, singular)

    def _diagonal(self, product: Product, b: Tensor) -> Tensor:
        """Return the mean of s ⊙ A s over random signs s, in size and at least a thousandth of its mean."""
        if not self.probes:
            return torch.ones_like(b)
        rng, total = Generator().manual_seed(self.seed), torch.zeros_like(b)
        for _ in range(self.probes):
            signs = torch.randint(0, 2, b.shape, generator=rng).to(b) * 2 - 1
            total = total + signs * product(signs)
        sizes = (total / self.probes).abs()
        least = 1e-3 * sizes.mean()
        return torch.where(least > 0, torch.maximum(sizes, least), 1.0)


@dataclass(frozen=True)
class Neumann:
    """The Neumann series, for an A whose eigenvalues are above zero, symmetric or not.

    x' = x + rate (b - A x),    x = rate Σ_k (I - rate A)^k b

    It starts from x = 0: so many terms are the derivative through as many steps of plain descent at the
    minimum (Lorraine, Vicol & Duvenaud, 2020), and fewer weigh small curvatures less. (docs/math.md, 29)

    iterations: the number of terms (100).
    rate: below 2 over the largest eigenvalue (None, 1 over an estimate of it by 20 more products).

    >>> A, b = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([3.0, 4.0])
    >>> metafop.hypergradients.Neumann(200)(lambda v: A @ v, b).x.round(decimals=4)
    tensor([1., 1.])
    """

    iterations: int = 100
    rate: float | None = None

    @property
    def symmetric(self) -> bool:
        return False

    def __post_init__(self) -> None:
        _check_iterations("Neumann", self.iterations)
        if self.rate is not None and not _is_number(self.rate, above=0):
            raise ValueError(
                f"Neumann takes a rate above zero, got {self.rate!r}. Pass one such as 0.1, or None."
            )

    def __call__(self, product: Product, b: Tensor) -> Solution:
        """Return x of A x = `b`, where `product(v)` is A v."""
        rate = self._rate(product, b) if self.rate is None else torch.as_tensor(self.rate).to(b)
        x, eps = torch.zeros_like(b), torch.finfo(b.dtype).eps
        for _ in range(self.iterations):
            x = x + rate * (b - product(x))
        rest = b - product(x)
        along, residual = product(rest), _relative(rest, b)
        negative = rest @ along < -10 * eps * rest.norm() * along.norm()
        singular = (residual > eps**0.5) & (rate * along.norm() <= eps**0.5 * rest.norm())
        return Solution(x, residual, torch.full_like(residual, self.iterations), negative, singular)

    def _rate(self, product: Product, b: Tensor) -> Tensor:
        """Return .9 over the largest eigenvalue, as power iteration from b finds it: if at all, too small."""
        v, size = b, b.norm()
        for _ in range(20):
            v = product(v / torch.where(size > 0, size, 1.0))
            size = v.norm()
        return torch.where(size > 0, 0.9 / size, 1.0)


def _relative(r: Tensor, b: Tensor) -> Tensor:
    size = b.norm()
    return torch.where(size > 0, r.norm() / torch.where(size > 0, size, 1.0), r.norm())


def _check_iterations(owner: str, iterations: Any) -> None:
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(
            f"{owner} takes one iteration or more, got iterations={iterations!r}. Pass an integer, such as "
            "100."
        )


def _is_number(x: Any, above: float) -> bool:
    return not isinstance(x, bool) and isinstance(x, int | float) and above < x < math.inf
