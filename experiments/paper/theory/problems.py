"""Random problems for Theorems 1 and 2, which are numbered as in docs/errata.md."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import softplus


class Problems(NamedTuple):
    """J(θ) = Σ hᵢ φ(qᵢᵀθ), one a row, with minimum 0 and L = max h; quadratics are PL with μ = min h > 0."""

    basis: Tensor  # (problems, n, n), with columns q
    curvature: Tensor  # (problems, n), h ≥ 0: zero where J is flat

    @property
    def extremes(self) -> tuple[Tensor, Tensor]:
        """μ and L."""
        h = self.curvature
        return h.where(h > 0, torch.inf).amin(1), h.amax(1)

    @property
    def factor(self) -> Tensor:
        """M with M Mᵀ = Σ hᵢ qᵢ qᵢᵀ."""
        return self.basis * self.curvature.sqrt()[:, None]


Function = Callable[[dict[str, Tensor], Problems], Tensor]


def quadratic(params: dict[str, Tensor], problem: Problems) -> Tensor:
    """φ(y) = y² / 2."""
    return 0.5 * (problem.curvature * (params["x"] @ problem.basis).square()).sum()


def log_cosh(params: dict[str, Tensor], problem: Problems) -> Tensor:
    """φ(y) = log cosh y: convex, L-smooth and ‖∇J‖ < ‖h‖ everywhere, as Theorem 2 assumes; but not PL."""
    y = (params["x"] @ problem.basis).abs()
    return (problem.curvature * (y + softplus(-2 * y) - math.log(2))).sum()


def spectral(
    count: int, n: int, low: float, high: float, generator: Generator, singular: bool = False
) -> Problems:
    """Draw symmetric matrices with eigenvalues in [low, high]; of singular ones, up to n - 1 are zero."""
    basis = torch.linalg.qr(torch.randn(count, n, n, generator=generator, dtype=torch.float64)).Q
    values = low + (high - low) * torch.rand(count, n, generator=generator, dtype=torch.float64)
    if singular:
        rank = torch.randint(1, n, (count, 1), generator=generator)
        values = values.where(torch.arange(n) < rank, 0.0)
    return Problems(basis, values)


def mixed(count: int, n: int, generator: Generator) -> Problems:
    """Draw problems for Theorem 2, every other one singular, all with L = 1."""
    definite = spectral(count, n, 0.1, 1.0, generator)
    singular = spectral(count, n, 0.1, 1.0, generator, singular=True)
    odd = torch.arange(count)[:, None] % 2 == 1
    h = singular.curvature.where(odd, definite.curvature)
    return Problems(definite.basis, h / h.amax(1, keepdim=True))


class Kind(NamedTuple):
    """A kind of random quadratics, and of the P that they are minimised with."""

    label: str
    singular: bool  # PL, but not strongly convex
    largest: float  # eigenvalue that P may have; the smallest is 0.2


KINDS = {  # by name in summary.json
    "definite": Kind("positive definite", False, 1.0),
    "singular": Kind("singular", True, 1.0),
    "wide": Kind("P up to 4", False, 4.0),
}
FUNCTIONS = {  # by name in summary.json: J, and half the side of the box that starts are uniform in
    "quadratic": (quadratic, 1.0),
    "log_cosh": (log_cosh, 20.0),
}
