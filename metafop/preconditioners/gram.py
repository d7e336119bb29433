"""Products with P = M Mᵀ, each in the cheaper order. Gradients are rows: (…, rows, n), and M is (…, n, k)."""

from typing import NamedTuple

import torch
from torch import Tensor

_NARROW = 16  # columns: below this, BLAS takes up to six times as long over a tall product as over a wide one


class Factor(NamedTuple):
    """What gradients are multiplied by: P = M Mᵀ (`whole`), or M and then Mᵀ."""

    matrix: Tensor
    whole: bool


def is_whole(m: Tensor, count: int) -> bool:
    """Return whether P itself is less work than M twice, for a gradient of `count` rows."""
    n, k = m.shape[-2:]
    return n * (k + count) < 2 * count * k


def product(m: Tensor) -> Tensor:
    """Return `M Mᵀ`."""
    return m @ m.mT


def factor(m: Tensor, count: int) -> Factor:
    """Return what is less work for a gradient of `count` rows; it can serve many."""
    whole = is_whole(m, count)
    return Factor(product(m) if whole else m, whole)


def rows(m: Tensor, grad: Tensor) -> Tensor:
    """Return `grad` cut into rows of n numbers, in M's precision; leading dimensions of M are a stack."""
    g = grad.reshape(*m.shape[:-2], -1, m.shape[-2])
    return g if g.dtype == m.dtype else g.to(m.dtype)


def count(m: Tensor, grad: Tensor) -> int:
    """Return how many rows of n numbers `grad` has, in each entry of a stack."""
    return grad.numel() * m.shape[-1] // m.numel()


def times(factor: Factor, g: Tensor) -> Tensor:
    """Return `G M Mᵀ`: each row g becomes M Mᵀ g."""
    p = factor.matrix
    return g @ p if factor.whole else _tall(g, p) @ p.mT


def plus_times(factor: Factor, g: Tensor) -> Tensor:
    """Return `G + G M Mᵀ`."""
    p = factor.matrix
    if p.dim() > 2:
        return g + times(factor, g)
    return torch.addmm(g, g, p) if factor.whole else torch.addmm(g, _tall(g, p), p.mT)


def is_crossed(m: Tensor, count: int) -> bool:
    """Return whether the pullback is less work by way of the n-by-n matrix `cross`."""
    n, k = m.shape[-2:]
    return count * n + n * k < 4 * count * k


def cross(g: Tensor, c: Tensor) -> Tensor:
    return c.mT @ g


def pullback_crossed(m: Tensor, cross: Tensor) -> Tensor:
    """Return `∇_M ⟨C, G M Mᵀ⟩ = (X + Xᵀ) M`, given X = CᵀG (docs/math.md, 2)."""
    return (cross + cross.mT) @ m


def pullback(m: Tensor, g: Tensor, c: Tensor) -> Tensor:
    """Return `∇_M ⟨C, G M Mᵀ⟩ = (CᵀG + GᵀC) M`, multiplied in the cheaper order (docs/math.md, 2)."""
    if is_crossed(m, g.shape[-2]):
        return pullback_crossed(m, cross(g, c))
    return _tall(c.mT, _tall(g, m)) + _tall(g.mT, _tall(c, m))


def norm(m: Tensor) -> Tensor:
    """Return `‖M Mᵀ‖_F = ‖Mᵀ M‖_F`. The largest number is divided out first: fourth powers underflow."""
    largest = m.detach().abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(m.dtype).tiny)
    small = m / largest
    return torch.linalg.matrix_norm(small.mT @ small) * largest[..., 0, 0] ** 2


def _tall(a: Tensor, b: Tensor) -> Tensor:
    """Return `A B`, for a B of few columns as the transpose of `Bᵀ Aᵀ`."""
    return (b.mT @ a.mT).mT if b.shape[-1] < _NARROW else a @ b
