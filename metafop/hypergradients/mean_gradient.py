"""The gradient of the mean loss of batches, and its derivatives: what a minimum is defined by."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from metafop import tree
from metafop.hypergradients.graphs import with_constant_buffers
from metafop.hypergradients.inputs import Inputs, inputs_of
from metafop.hypergradients.linear_solvers import Product
from metafop.hypergradients.step_vjp import gradients
from metafop.hypergradients.validation import batch_at
from metafop.protocols import Batches
from metafop.training import Training
from metafop.types import Batch, Meta


class MeanGradient(NamedTuple):
    """∇J as a function of parameters and leaves, J the mean loss of batches; equal ones are computed once."""

    inputs: Inputs
    batches: list[Batch]
    weights: list[float]
    functions: list[Callable[[Sequence[Tensor]], list[Tensor]]]

    @staticmethod
    def of(training: Training, meta: Meta, carry: Any, batches: Batches) -> MeanGradient:
        inputs, steps = inputs_of(meta, with_constant_buffers(carry)), len(batches)
        distinct, counts = {}, {}
        for t in range(steps):
            batch = batch_at(batches, t)
            distinct[id(batch)] = batch  # kept, so that no other has its id
            counts[id(batch)] = counts.get(id(batch), 0) + 1
        functions = [partial(gradients, training, inputs, batch) for batch in distinct.values()]
        return MeanGradient(inputs, list(distinct.values()), [counts[k] / steps for k in distinct], functions)

    def __call__(self) -> list[Tensor]:
        return self._mean(lambda function: function(self.inputs.params))

    def product(self) -> Product:
        """Return v ↦ (∂∇J/∂θ)ᵀ v. The gradient's graph is kept if there is one batch, else made again."""
        params = self.inputs.params
        kept = [vjp(self.functions[0], params)[1]] if len(self.functions) == 1 else []

        def product(v: Tensor) -> Tensor:
            parts = cut(v, params)
            if kept:
                return flat(kept[0](parts)[0])
            return flat(self._mean(lambda function: vjp(function, params)[1](parts)[0]))

        return product

    def pulled_in_leaves(self, x: Tensor) -> Any:
        """Return (∂∇J/∂φ)ᵀ x, a tree like the leaves φ of the loss."""
        params, leaves = self.inputs.params, self.inputs.leaves
        parts = cut(x, params)

        def pulled(function: Callable[[Sequence[Tensor]], list[Tensor]]) -> list[Tensor]:
            return vjp(lambda leaves: function([*params, *leaves]), leaves)[1](parts)[0]

        structure = tree.flatten(self.inputs.meta.loss)[1]
        return tree.unflatten(self._mean(pulled), structure)

    def _mean(self, of: Callable[[Any], list[Tensor]]) -> list[Tensor]:
        total: list[Tensor] = []
        for function, weight in zip(self.functions, self.weights, strict=True):
            part = tree.scale(of(function), weight)
            total = tree.add(total, part) if total else part
        return total


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


def cut(v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = v.split([x.numel() for x in like])
    return [part.view_as(x).to(x.dtype) for part, x in zip(parts, like, strict=True)]
