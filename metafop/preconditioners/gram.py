"""Products with P = M Mᵀ that never form P. Gradients are rows: (…, rows, n), and M is (…, n, k)."""

import torch
from torch import Tensor


def rows(m: Tensor, grad: Tensor) -> Tensor:
    """Return `grad` cut into rows of n numbers, in M's precision; leading dimensions of M are a stack."""
    return grad.reshape(*m.shape[:-2], -1, m.shape[-2]).to(m.dtype)


def apply(m: Tensor, g: Tensor) -> Tensor:
    """Return `G M Mᵀ`: each row g becomes M Mᵀ g."""
    return (g @ m) @ m.mT


def pullback(m: Tensor, g: Tensor, c: Tensor) -> Tensor:
    """Return `∇_M ⟨C, G M Mᵀ⟩ = (CᵀG + GᵀC) M`, multiplied in the cheaper order (docs/math.md, 2)."""
    count, n, k = g.shape[-2], m.shape[-2], m.shape[-1]
    if count * n + n * k < 4 * count * k:
        cross = c.mT @ g
        return (cross + cross.mT) @ m
    return c.mT @ (g @ m) + g.mT @ (c @ m)


def norm(m: Tensor) -> Tensor:
    """Return `‖M Mᵀ‖_F = ‖Mᵀ M‖_F`. The largest number is divided out first: fourth powers underflow."""
    largest = m.detach().abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(m.dtype).tiny)
    small = m / largest
    return torch.linalg.matrix_norm(small.mT @ small) * largest[..., 0, 0] ** 2
