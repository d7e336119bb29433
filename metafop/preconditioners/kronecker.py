"""A matrix on each side of a layer's gradient."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from metafop.preconditioners import gram
from metafop.preconditioners.dense import Dense, inputs


class KroneckerFactors(NamedTuple):
    """What a `Kronecker` preconditioner holds: M, over the `inputs`, and R, over the `outputs`."""

    inputs: Tensor
    outputs: Tensor


@dataclass(frozen=True)
class Kronecker:
    """P = R Rᵀ ⊗ M Mᵀ: rows G of a layer's gradient become R Rᵀ G M Mᵀ. Both start at the identity.

    M mixes the inputs, R the outputs. (docs/math.md, 3)

    >>> m = Kronecker().init(torch.zeros(3, 2))
    >>> m.inputs.shape, m.outputs.shape
    (torch.Size([2, 2]), torch.Size([3, 3]))
    """

    def init(self, param: Tensor, generator: Generator | None = None) -> KroneckerFactors:
        if param.dim() < 2:
            raise ValueError(
                f"Kronecker fits a parameter with inputs and outputs, got one of shape {tuple(param.shape)}. "
                "For a vector use Dense or Diagonal."
            )
        outputs = param.new_empty(param.shape[0])
        return KroneckerFactors(Dense().init(param.new_empty(inputs(param))), Dense().init(outputs))

    def apply(self, m: KroneckerFactors, grad: Tensor) -> Tensor:
        g = gram.rows(m.inputs, grad)
        over_inputs = Dense().apply(m.inputs, g)
        return (m.outputs @ (m.outputs.mT @ over_inputs)).reshape(grad.shape).to(grad.dtype)

    def pullback(self, m: KroneckerFactors, grad: Tensor, cotangent: Tensor) -> KroneckerFactors:
        """Return `(CᵀB + BᵀC) M` with B = R Rᵀ G, and `(C Aᵀ + A Cᵀ) R` with A = G M Mᵀ."""
        g, c = gram.rows(m.inputs, grad), gram.rows(m.inputs, cotangent)
        b = m.outputs @ (m.outputs.mT @ g)
        a = Dense().apply(m.inputs, g)
        return KroneckerFactors(gram.pullback(m.inputs, b, c), gram.pullback(m.outputs, a.mT, c.mT))

    def dimension(self, m: KroneckerFactors) -> int:
        return m.inputs.shape[-2] * m.outputs.shape[-2]

    def norm(self, m: KroneckerFactors) -> Tensor:
        return Dense().norm(m.outputs) * Dense().norm(m.inputs)

    def eigenvalues(self, m: KroneckerFactors) -> Tensor:
        return (
            Dense().eigenvalues(m.outputs)[..., None] * Dense().eigenvalues(m.inputs)[..., None, :]
        ).flatten(-2)

    def matrix(self, m: KroneckerFactors) -> Tensor:
        return torch.kron(Dense().matrix(m.outputs), Dense().matrix(m.inputs))
