"""The derivative of one step going forward: how the tangents of a carry go along with it."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from metafop import leaf_names, stopped_gradients, tree
from metafop.hypergradients.graphs import with_constant_buffers
from metafop.hypergradients.inputs import Inputs, inputs_of
from metafop.hypergradients.locked_jvp import jvp
from metafop.hypergradients.step_vjp import Over
from metafop.protocols import Trains
from metafop.types import Batch, Meta, Seen

Tangents = list[Tensor]  # for each floating-point leaf of a carry, one row for each learned number


@dataclass(frozen=True)
class StepJVP:
    """One step forward: the carry after it, what it saw, and the tangents of the carry.

    ġ = H θ̇ + ∂g/∂leaves,    Ċ' = ∂advance/∂carry Ċ + ∂advance/∂g ġ + ∂advance/∂meta

    ġ is the tangent of the gradient (`over="forward"`) or found by pullbacks of it; one is enough where only
    the Hessian is asked for, which is symmetric.
    """

    training: Trains
    meta: Meta
    basis: leaf_names.Leaves  # the direction of every learned number, one a row
    over: Over

    def __call__(self, carry: Any, batch: Batch, tangents: Tangents) -> tuple[Any, Seen, Tangents]:
        floats, rebuild = tree.partition(carry)
        seen, d_read = self._evaluate(carry, batch, tangents)
        of_meta = tree.named(self.meta)
        basis = {name: rows for name, rows in self.basis.items() if name in of_meta}

        def advance(learned: leaf_names.Leaves, floats: list[Tensor], read: Any) -> tuple[Any, Any]:
            grads, cotangent, value = read
            looked_at = seen._replace(value=value, grads=grads, cotangent=cotangent)
            before = with_constant_buffers(rebuild(floats))
            after, _ = self.training.advance(tree.replace(self.meta, learned), before, looked_at)
            return tree.partition(after)[0], after

        here = ({name: of_meta[name] for name in basis}, floats, _read(seen))
        tangents, after = _pushed(advance, here, (basis, tangents, d_read))
        return after, seen, tangents

    def _evaluate(self, carry: Any, batch: Batch, tangents: Tangents) -> tuple[Seen, Any]:
        """Return what is seen, and the tangents of what `advance` reads of it."""
        inputs, d_inputs = self._inputs(carry, tangents)

        def evaluate(tensors: list[Tensor]) -> tuple[Any, Seen]:
            seen = self.training.evaluate(*inputs.put(tensors), batch)
            return _read(seen), seen

        if self.over == "forward":
            d_read, seen = _pushed(evaluate, (inputs.tensors,), (d_inputs,))
            return seen, d_read
        with stopped_gradients.recording() as record:
            pulling: Any = vjp(evaluate, inputs.tensors, has_aux=True)
        _, pull, seen = pulling
        if not record and not inputs.leaves and not seen.cotangent:
            zero, d_params = torch.zeros_like(seen.value), dict(zip(seen.grads, d_inputs, strict=True))
            d_grads = vmap(lambda along: pull((along, (), zero))[0])(d_params)
            d_value = dots(d_inputs, list(seen.grads.values())).to(seen.value.dtype)
            return seen, (dict(zip(seen.grads, d_grads, strict=True)), (), d_value)
        # Where the derivative J is not symmetric, the pullback of v ↦ Jᵀ v is u ↦ J u.
        transposed = vjp(lambda v: pull(v)[0], _read(seen))[1]
        return seen, vmap(transposed)(d_inputs)[0]

    def _inputs(self, carry: Any, tangents: Tangents) -> tuple[Inputs, list[Tensor]]:
        """Return what the gradient depends on and moves, and its tangents: leaves of meta only if learned."""
        inputs, names = inputs_of(self.meta, carry), list(tree.named(self.meta))
        rows = dict(enumerate([*map(self.basis.get, names), *tangents]))
        moving = [
            (place, x, row)
            for place, x in zip(inputs.places, inputs.tensors, strict=True)
            if (row := rows[place]) is not None
        ]
        places, tensors, d_inputs = map(list, zip(*moving, strict=True))
        return replace(inputs, places=places, tensors=tensors), d_inputs


def _read(seen: Seen) -> Any:
    """Return what `advance` reads of what was seen, but for buffers."""
    return seen.grads, seen.cotangent, seen.value


def _pushed(function: Callable[..., tuple[Any, Any]], here: tuple, along: tuple) -> tuple[Any, Any]:
    """Return the tangents of a function along each row, and what it returns besides."""
    push: Callable[..., Any] = vmap(lambda *along: jvp(function, here, along, has_aux=True)[1:])
    tangents, besides = push(*along)
    # Computed once: only tangents differ from row to row, and vmap shows one tensor as if there were many.
    return tangents, tree.map(lambda x: x[0], besides)


def dots(rows: list[Tensor], x: list[Tensor]) -> Tensor:
    """Return ⟨row, x⟩ for each row."""
    products = [row.reshape(len(row), -1) @ leaf.flatten() for row, leaf in zip(rows, x, strict=True)]
    return torch.stack(products).sum(0)
