"""Preconditioners that do not mix directions: none, one number per parameter tensor, one per number in it."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from metafop import tree


@dataclass(frozen=True)
class Identity:
    """P = I: nothing is learned.

    >>> Identity().apply((), torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    def init(self, param: Tensor, generator: Generator | None = None) -> tuple[()]:
        return ()

    def apply(self, m: tuple[()], grad: Tensor) -> Tensor:
        return grad

    def pullback(self, m: tuple[()], grad: Tensor, cotangent: Tensor) -> tuple[()]:
        return ()

    def dimension(self, m: tuple[()]) -> int:
        return 1

    def norm(self, m: tuple[()]) -> Tensor:
        return torch.ones(())

    def eigenvalues(self, m: tuple[()]) -> Tensor:
        return torch.ones(1)

    def matrix(self, m: tuple[()]) -> Tensor:
        return torch.ones(1, 1)


@dataclass(frozen=True)
class Scalar:
    """P = s I: a learning rate per parameter tensor (S-HD; Baydin et al., 2018). Starts at s = 1.

    (docs/math.md, 8)

    >>> Scalar().apply(torch.tensor(0.5), torch.tensor([1.0, 2.0]))
    tensor([0.5000, 1.0000])
    """

    def init(self, param: Tensor, generator: Generator | None = None) -> Tensor:
        return param.new_ones((), dtype=torch.promote_types(param.dtype, torch.float32))

    def apply(self, m: Tensor, grad: Tensor) -> Tensor:
        return (m * grad).to(grad.dtype)

    def pullback(self, m: Tensor, grad: Tensor, cotangent: Tensor) -> Tensor:
        """Return `∂⟨c, s g⟩/∂s = ⟨c, g⟩`."""
        return tree.dot(cotangent.to(m.dtype), grad.to(m.dtype))

    def dimension(self, m: Tensor) -> int:
        return 1

    def norm(self, m: Tensor) -> Tensor:
        return m.abs()

    def eigenvalues(self, m: Tensor) -> Tensor:
        return m.reshape(1)

    def matrix(self, m: Tensor) -> Tensor:
        return m.reshape(1, 1)


@dataclass(frozen=True)
class Diagonal:
    """P = diag(d): a learning rate per number (PP-HD; Almeida et al., 1999). Starts at d = 1.

    (docs/math.md, 8)

    >>> Diagonal().apply(torch.tensor([0.5, 2.0]), torch.tensor([1.0, 2.0]))
    tensor([0.5000, 4.0000])
    """

    def init(self, param: Tensor, generator: Generator | None = None) -> Tensor:
        return torch.ones_like(param, dtype=torch.promote_types(param.dtype, torch.float32))

    def apply(self, m: Tensor, grad: Tensor) -> Tensor:
        return (m * grad).to(grad.dtype)

    def pullback(self, m: Tensor, grad: Tensor, cotangent: Tensor) -> Tensor:
        """Return `∂⟨c, d ⊙ g⟩/∂d = c ⊙ g`."""
        return cotangent.to(m.dtype) * grad.to(m.dtype)

    def dimension(self, m: Tensor) -> int:
        return m.numel()

    def norm(self, m: Tensor) -> Tensor:
        return torch.linalg.vector_norm(m)

    def eigenvalues(self, m: Tensor) -> Tensor:
        return m.flatten()

    def matrix(self, m: Tensor) -> Tensor:
        return torch.diag(m.flatten())
