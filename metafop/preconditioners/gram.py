"""Products with P = M Mᵀ, each in the cheaper order. Gradients are rows: (…, rows, n), and M is (…, n, k)."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

# Over products with few columns BLAS takes up to six times as long as their size tells: below this number,
# transposes are multiplied, or rows are taken together.
_NARROW = 16


class Factor(NamedTuple):
    """What gradients are multiplied by: P = M Mᵀ, for one row or several; or M, and then Mᵀ (`back`)."""

    matrix: Tensor
    back: Tensor | None = None


def is_whole(m: Tensor, count: int) -> bool:
    """Return whether P itself is less work than M twice, for a gradient of `count` rows."""
    n, k = m.shape[-2:]
    return n * (k + count) < 2 * count * k


def together(n: int, count: int) -> int:
    """Return how many of `count` rows of n numbers are multiplied as one: 2 for n = 9, 16 for n = 1."""
    several = 1
    while n * several < _NARROW and count % (2 * several) == 0:
        several *= 2
    return several


def product(m: Tensor, several: int) -> Tensor:
    """Return `M Mᵀ`, as often along the diagonal as rows are taken together."""
    p = m @ m.mT
    if several == 1:
        return p
    n = several * m.shape[-2]
    return (_once(several, p) * p[..., None, :, None, :]).reshape(*p.shape[:-2], n, n)


def factor(m: Tensor, count: int) -> Factor:
    """Return what is less work for a gradient of `count` rows; it can serve many."""
    if not is_whole(m, count):
        return half(m)
    return Factor(product(m, together(m.shape[-2], count)))


def half(m: Tensor) -> Factor:
    """Return M as a factor; one of few columns is stored column by column, which BLAS takes much faster."""
    back = m.mT
    if m.shape[-1] < _NARROW:
        back = back.contiguous()
        m = back.mT
    return Factor(m, back)


def rows(m: Tensor, grad: Tensor) -> Tensor:
    """Return `grad` cut into rows of n numbers, in M's precision; leading dimensions of M are a stack."""
    return _cut(m, grad, m.shape[-2])


def count(m: Tensor, grad: Tensor) -> int:
    """Return how many rows of n numbers `grad` has, in each entry of a stack."""
    return grad.numel() * m.shape[-1] // m.numel()


def preconditioner_function(factor: Factor, grad: Tensor, plus: bool) -> Callable[[Tensor], Tensor]:
    """Return what makes `G M Mᵀ`, or `G + G M Mᵀ`, of a gradient G of this shape and precision.

    All that can be decided beforehand is: it can serve many.
    """
    p, back = factor
    if back is None:
        product = partial(_plus_times if plus else _times, p)
    else:
        product = partial(_plus_times_both if plus else _times_both, p, back)
    if grad.dtype == p.dtype and _is_cut(p, grad, p.shape[0]):
        return product
    return partial(_turn_rows, product, p)


def is_crossed(m: Tensor, count: int) -> bool:
    """Return whether the pullback is less work by way of the n-by-n matrix `cross`."""
    n, k = m.shape[-2:]
    return count * n + n * k < 4 * count * k


def cross(m: Tensor, grad: Tensor, cotangent: Tensor, several: int) -> Tensor:
    """Return `CᵀG` in its diagonal blocks, as many as rows are taken together; `blocks` adds them up."""
    n = several * m.shape[-2]
    return _cut(m, cotangent, n).mT @ _cut(m, grad, n)


def blocks(crosses: Tensor, several: int) -> Tensor:
    """Return the sum of the diagonal blocks."""
    if several == 1:
        return crosses
    n = crosses.shape[-1] // several
    blocks = crosses.reshape(*crosses.shape[:-2], several, n, several, n)
    return (_once(several, crosses) * blocks).sum((-4, -2))


def pullback_crossed(m: Tensor, crosses: Tensor, several: int) -> Tensor:
    """Return `∇_M ⟨C, G M Mᵀ⟩ = (X + Xᵀ) M`, given X = CᵀG (docs/math.md, 2)."""
    x = blocks(crosses, several)
    return (x + x.mT) @ m


def pullback(m: Tensor, grad: Tensor, cotangent: Tensor) -> Tensor:
    """Return `∇_M ⟨C, G M Mᵀ⟩ = (CᵀG + GᵀC) M`, multiplied in the cheaper order (docs/math.md, 2)."""
    size = count(m, grad)
    if is_crossed(m, size):
        several = together(m.shape[-2], size)
        return pullback_crossed(m, cross(m, grad, cotangent, several), several)
    return pullback_both(m, grad, cotangent)


def pullback_both(m: Tensor, grad: Tensor, cotangent: Tensor) -> Tensor:
    """Return `Cᵀ (G M) + Gᵀ (C M)`."""
    g, c = rows(m, grad), rows(m, cotangent)
    if m.shape[-1] >= _NARROW:
        return _add_product(c.mT @ (g @ m), g.mT, c @ m)
    narrow = m.mT.contiguous()  # which BLAS takes faster
    if m.dim() > 2:
        return ((narrow @ g.mT) @ c + (narrow @ c.mT) @ g).mT
    return torch.addmm(linear(narrow, g) @ c, linear(narrow, c), g).mT


def norm(m: Tensor) -> Tensor:
    """Return `‖M Mᵀ‖_F = ‖Mᵀ M‖_F`. The largest number is divided out first: fourth powers underflow."""
    largest = m.detach().abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(m.dtype).tiny)
    small = m / largest
    return torch.linalg.matrix_norm(small.mT @ small) * largest[..., 0, 0] ** 2


def _times(p: Tensor, g: Tensor) -> Tensor:
    return g @ p


def _times_both(p: Tensor, q: Tensor, g: Tensor) -> Tensor:
    return (g @ p) @ q


def _plus_times(p: Tensor, g: Tensor) -> Tensor:
    return _add_product(g, g, p)


def _plus_times_both(p: Tensor, q: Tensor, g: Tensor) -> Tensor:
    if g.dim() == 2:
        return torch.addmm(g, torch.mm(g, p), q)
    return g + (g @ p) @ q


def _turn_rows(product: Callable[[Tensor], Tensor], p: Tensor, grad: Tensor) -> Tensor:
    """Return the product of the gradient's rows, in its own shape and precision."""
    result = product(rows(p, grad)).reshape(grad.shape)
    return result if result.dtype == grad.dtype else result.to(grad.dtype)


def _add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return `X + A B`."""
    return torch.addmm(x, a, b) if x.dim() == 2 else x + a @ b


def _once(several: int, like: Tensor) -> Tensor:
    """Return ones on the diagonal of blocks, (several, 1, several, 1)."""
    return torch.eye(several, dtype=like.dtype, device=like.device)[:, None, :, None]


def _cut(m: Tensor, grad: Tensor, n: int) -> Tensor:
    if not _is_cut(m, grad, n):
        grad = grad.reshape(*m.shape[:-2], -1, n)
    return grad if grad.dtype == m.dtype else grad.to(m.dtype)


def _is_cut(m: Tensor, grad: Tensor, n: int) -> bool:
    return m.dim() == grad.dim() == 2 and grad.shape[1] == n
