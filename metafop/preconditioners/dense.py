"""Full matrices P = M Mᵀ: over a layer's inputs, or over the positions of a convolution's kernel."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from metafop.preconditioners import gram


@dataclass(frozen=True)
class Dense:
    """P = M Mᵀ over the inputs of a layer, shared by its outputs; over all of a vector. Starts at M = I.

    A parameter of shape (outputs, …) has n = numel / outputs inputs. (docs/math.md, 2)

    >>> weight = torch.zeros(3, 2)
    >>> m = Dense().init(weight)
    >>> torch.equal(Dense().apply(2 * m, torch.ones(3, 2)), torch.full((3, 2), 4.0))
    True
    """

    def init(self, param: Tensor, generator: Generator | None = None) -> Tensor:
        return _identity(inputs(param), param)

    def apply(self, m: Tensor, grad: Tensor) -> Tensor:
        return self.preconditioner_function(gram.factor(m, gram.count(m, grad)), grad)(grad)

    def preconditioner_function(self, factor: gram.Factor, grad: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what makes P g of gradients like `grad`, `factor` being `gram.factor` of m and its rows."""
        return gram.preconditioner_function(factor, grad, plus=False)

    def pullback(self, m: Tensor, grad: Tensor, cotangent: Tensor) -> Tensor:
        """Return `(CᵀG + GᵀC) M`."""
        return gram.pullback(m, grad, cotangent)

    def dimension(self, m: Tensor) -> int:
        return m.shape[-2]

    def norm(self, m: Tensor) -> Tensor:
        return gram.norm(m)

    def eigenvalues(self, m: Tensor) -> Tensor:
        return torch.linalg.svdvals(m).square()

    def matrix(self, m: Tensor) -> Tensor:
        return m @ m.mT


@dataclass(frozen=True)
class Spatial:
    """P = M Mᵀ over the k² positions of a kernel, shared by all pairs of channels (the paper, section 2.2).

    For the kernels of a convolution of any dimension, (out, in, k, …). Starts at M = I.

    >>> kernels = torch.zeros(8, 4, 3, 3)
    >>> Spatial().init(kernels).shape
    torch.Size([9, 9])
    """

    def init(self, param: Tensor, generator: Generator | None = None) -> Tensor:
        if param.dim() < 3:
            raise ValueError(
                f"Spatial fits kernels of shape (out, in, k, ...), got one of shape {tuple(param.shape)}. "
                "For a matrix or a vector use LowRank or Dense."
            )
        return _identity(math.prod(param.shape[2:]), param)

    def apply(self, m: Tensor, grad: Tensor) -> Tensor:
        return Dense().apply(m, grad)

    def preconditioner_function(self, factor: gram.Factor, grad: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what makes P g of gradients like `grad`, `factor` being `gram.factor` of m and its rows."""
        return Dense().preconditioner_function(factor, grad)

    def pullback(self, m: Tensor, grad: Tensor, cotangent: Tensor) -> Tensor:
        return Dense().pullback(m, grad, cotangent)

    def dimension(self, m: Tensor) -> int:
        return Dense().dimension(m)

    def norm(self, m: Tensor) -> Tensor:
        return Dense().norm(m)

    def eigenvalues(self, m: Tensor) -> Tensor:
        return Dense().eigenvalues(m)

    def matrix(self, m: Tensor) -> Tensor:
        return Dense().matrix(m)


def inputs(param: Tensor) -> int:
    """Return how many inputs each output of the parameter has; a vector is one output."""
    return math.prod(param.shape[1:]) if param.dim() > 1 else param.numel()


def _identity(n: int, param: Tensor) -> Tensor:
    return torch.eye(n, dtype=torch.promote_types(param.dtype, torch.float32), device=param.device)
