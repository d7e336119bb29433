"""Low-rank departures from the identity, P = I + M Mᵀ, for wide layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from metafop.preconditioners import gram
from metafop.preconditioners.dense import inputs


@dataclass(frozen=True)
class LowRank:
    """P = I + M Mᵀ over the inputs of a layer, M of size n by `rank` (the paper, appendix A.4).

    M starts as normal noise: at M = 0 the hypergradient is exactly zero, and nothing would ever be learned.
    (docs/math.md, 2)

    rank: how many columns M has, from 1 to n (4).
    sigma: the standard deviation of the noise, above zero (0.01).

    >>> weight = torch.zeros(10, 784)
    >>> LowRank(rank=4).init(weight, torch.Generator().manual_seed(0)).shape
    torch.Size([784, 4])
    """

    rank: int = 4
    sigma: float = 0.01

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(
                f"LowRank needs a rank of at least 1, got rank={self.rank}. "
                "To train without preconditioning, pass Identity()."
            )
        if not self.sigma > 0:
            raise ValueError(
                f"LowRank needs a sigma above zero, got sigma={self.sigma}. "
                "At M = 0 the hypergradient is zero and M never moves; the default is 0.01."
            )

    def init(self, param: Tensor, generator: Generator | None = None) -> Tensor:
        n = inputs(param)
        if self.rank > n:
            raise ValueError(
                f"LowRank(rank={self.rank}) does not fit a parameter of shape {tuple(param.shape)}, "
                f"which has {n} inputs. Pass a rank of at most {n}."
            )
        if generator is None:
            raise ValueError(
                "LowRank starts at random and got no generator. Pass torch.Generator().manual_seed(seed)."
            )
        dtype = torch.promote_types(param.dtype, torch.float32)
        noise = torch.randn(n, self.rank, generator=generator, dtype=dtype, device=generator.device)
        return self.sigma * noise.to(param.device)

    def apply(self, m: Tensor, grad: Tensor) -> Tensor:
        return self.preconditioner_function(gram.factor(m, gram.count(m, grad)), grad)(grad)

    def preconditioner_function(self, factor: gram.Factor, grad: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what makes P g of gradients like `grad`, `factor` being `gram.factor` of m and its rows."""
        return gram.preconditioner_function(factor, grad, plus=True)

    def pullback(self, m: Tensor, grad: Tensor, cotangent: Tensor) -> Tensor:
        """Return `(CᵀG + GᵀC) M` without forming an n-by-n matrix."""
        return gram.pullback(m, grad, cotangent)

    def dimension(self, m: Tensor) -> int:
        return m.shape[-2]

    def norm(self, m: Tensor) -> Tensor:
        """Return `‖I + M Mᵀ‖_F`, whose square is n + 2 ‖M‖² + ‖Mᵀ M‖²."""
        small = m.mT @ m
        return (m.shape[-2] + 2 * m.square().sum((-2, -1)) + small.square().sum((-2, -1))).sqrt()

    def eigenvalues(self, m: Tensor) -> Tensor:
        learned = 1 + torch.linalg.svdvals(m).square()
        return torch.cat([learned, m.new_ones(*m.shape[:-2], m.shape[-2] - m.shape[-1])], dim=-1)

    def matrix(self, m: Tensor) -> Tensor:
        return torch.eye(m.shape[-2], dtype=m.dtype, device=m.device) + m @ m.mT
