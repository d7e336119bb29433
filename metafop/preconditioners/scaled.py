"""Wrappers that rescale another family's P by a number that depends on its norm: P' = s(‖P‖_F) P."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from metafop import tree
from metafop.protocols import Inspectable
from metafop.types import Tree


class _Scaled(ABC):
    """What `Normalized` and `Bounded` have in common: all but the scale."""

    family: Inspectable

    def __post_init__(self) -> None:
        _check_family(self)

    def init(self, param: Tensor, generator: Generator | None = None) -> Tree:
        return self.family.init(param, generator)

    def apply(self, m: Tree, grad: Tensor) -> Tensor:
        return (self._scale(m) * self.family.apply(m, grad)).to(grad.dtype)

    def dimension(self, m: Tree) -> int:
        return self.family.dimension(m)

    def norm(self, m: Tree) -> Tensor:
        return self._scale(m) * self.family.norm(m)

    def pullback(self, m: Tree, grad: Tensor, cotangent: Tensor) -> Tree:
        return _pullback(self.family, self._scale, m, grad, cotangent)

    def eigenvalues(self, m: Tree) -> Tensor:
        return self._scale(m) * self.family.eigenvalues(m)

    def matrix(self, m: Tree) -> Tensor:
        return self._scale(m) * self.family.matrix(m)

    @abstractmethod
    def _scale(self, m: Tree) -> Tensor: ...


@dataclass(frozen=True)
class Normalized(_Scaled):
    """√n P / ‖P‖_F: P turns the gradient, and has the norm of the identity (FOP-norm, appendix A.2).

    family: that of P, such as `Dense()`; any that is `Inspectable`.

    >>> family = Normalized(Scalar())
    >>> family.apply(torch.tensor(7.0), torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    family: Inspectable

    def _scale(self, m: Tree) -> Tensor:
        return self.family.dimension(m) ** 0.5 / _nonzero(self.family.norm(m))


@dataclass(frozen=True)
class Bounded(_Scaled):
    """min(1, limit √n / ‖P‖_F) P: the norm of P is at most `limit` times that of the identity.

    Not the spectral norm, which has no derivative where eigenvalues are equal, as they are where P starts.

    family: that of P, such as `Dense()`; any that is `Inspectable`.
    limit: finite and above zero (2.0).

    >>> family = Bounded(Scalar(), limit=4.0)
    >>> family.apply(torch.tensor(8.0), torch.tensor([1.0, 2.0]))
    tensor([4., 8.])
    """

    family: Inspectable
    limit: float = 2.0

    def __post_init__(self) -> None:
        _check_family(self)
        _check_limit(self, "Pass a positive number: at 1, P may only shrink the gradient.")

    def _scale(self, m: Tree) -> Tensor:
        largest = self.limit * self.family.dimension(m) ** 0.5
        return (largest / _nonzero(self.family.norm(m))).clamp(max=1)


class Aging(NamedTuple):
    """What a `Rescaled` preconditioner holds: its family's tensors, `inner`, and t, the `time`."""

    inner: Tree
    time: Tensor


def aged(m: Tree) -> Tree:
    """Return `m`, the tensors of a family, with every time in them moved on by one."""
    return Aging(aged(m.inner), m.time + 1) if isinstance(m, Aging) else m


def clocks(m: Tree, name: str) -> set[str]:
    """Return the names of the times in `m`, the tensors of a family that are called `name`.

    They pass, and are not learned.
    """
    return {f"{name}.time"} | clocks(m.inner, f"{name}.inner") if isinstance(m, Aging) else set()


def inverse_square(time: Tensor) -> Tensor:
    """Return `1 / t²`, the paper's example of a δ(t)."""
    return time**-2


@dataclass(frozen=True)
class Rescaled:
    """γ(t) P / ‖P‖_F with γ(t) = δ(t) ‖P‖_F + (1 - δ(t)) p∞: P is free at first and ends at the norm p∞.

    The modification for which the paper argues convergence (section 6; Baydin et al., 2018); the Frobenius
    norm, which is smooth, bounds the paper's spectral one. The time starts at 1, and moves on by one with
    each step that `Online` or `Unrolled` learns from.

    family: that of P, such as `Dense()`; any that is `Inspectable`.
    limit: p∞, finite and above zero. Convergence is argued for p∞ < 1/L, L the smoothness of the loss.
    delta: δ, which makes a number of t (`inverse_square`, 1 / t²).

    >>> family = Rescaled(Scalar(), limit=0.5)
    >>> family.apply(Aging(torch.tensor(7.0), torch.tensor(1.0)), torch.ones(1))
    tensor([7.])
    >>> family.apply(Aging(torch.tensor(7.0), torch.tensor(1e6)), torch.ones(1))
    tensor([0.5000])
    """

    family: Inspectable
    limit: float
    delta: Callable[[Tensor], Tensor] = field(default=inverse_square, repr=False)

    def __post_init__(self) -> None:
        _check_family(self)
        _check_limit(self, "Pass a norm below 1/L, L the smoothness of the loss.")

    def init(self, param: Tensor, generator: Generator | None = None) -> Aging:
        time = param.new_ones((), dtype=torch.promote_types(param.dtype, torch.float32))
        return Aging(self.family.init(param, generator), time)

    def apply(self, m: Aging, grad: Tensor) -> Tensor:
        return (self._scale(m) * self.family.apply(m.inner, grad)).to(grad.dtype)

    def dimension(self, m: Aging) -> int:
        return self.family.dimension(m.inner)

    def norm(self, m: Aging) -> Tensor:
        return self._scale(m) * self.family.norm(m.inner)

    def pullback(self, m: Aging, grad: Tensor, cotangent: Tensor) -> Aging:

        def scale(inner: Tree) -> Tensor:
            return self._scale(Aging(inner, m.time))

        inner = _pullback(self.family, scale, m.inner, grad, cotangent)
        return Aging(inner, torch.zeros_like(m.time))

    def eigenvalues(self, m: Aging) -> Tensor:
        return self._scale(m) * self.family.eigenvalues(m.inner)

    def matrix(self, m: Aging) -> Tensor:
        return self._scale(m) * self.family.matrix(m.inner)

    def _scale(self, m: Aging) -> Tensor:
        delta = self.delta(m.time.detach())  # time passes; it is not learned
        return delta + (1 - delta) * self.limit / _nonzero(self.family.norm(m.inner))


def _pullback(
    family: Inspectable, scale: Callable[[Tree], Tensor], m: Tree, grad: Tensor, cotangent: Tensor
) -> Tree:
    """Return `s ∂⟨c, P g⟩ + ⟨c, P g⟩ ∂s`, ∂s by autograd: the product rule (docs/math.md, 4)."""
    if not tree.leaves(m):
        return m
    value = scale(m)
    along = tree.dot(cotangent, family.apply(m, grad)).to(value.dtype)
    return tree.add(tree.scale(family.pullback(m, grad, cotangent), value), tree.pull(scale, m, along))


def _check_family(wrapper: Normalized | Bounded | Rescaled | _Scaled) -> None:
    if isinstance(wrapper.family, type) or not isinstance(wrapper.family, Inspectable):
        raise TypeError(
            f"{type(wrapper).__name__} wraps a family that has dimension, norm, eigenvalues and matrix, "
            f"got {wrapper.family!r}. Pass one such as Dense(), or give yours these methods."
        )


def _check_limit(wrapper: Bounded | Rescaled, remedy: str) -> None:
    limit = wrapper.limit
    # At infinity the scale would have the derivative 0 · ∞.
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        name = type(wrapper).__name__
        raise ValueError(f"{name} takes a finite limit above zero, got limit={limit!r}. {remedy}")


def _nonzero(norm: Tensor) -> Tensor:
    """P = 0 stays zero instead of becoming 0/0."""
    return norm.clamp(min=torch.finfo(norm.dtype).tiny)
