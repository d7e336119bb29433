"""The steps of an unroll, forward and back, compiled: on lists of leaves, which are faster than trees."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.hypergradients.channels_last import channels_last, takes_channels_last
from metafop.hypergradients.compiled import Compiled, Formed, Leaves
from metafop.hypergradients.outer_loss import Cotangent
from metafop.hypergradients.per_training_cache import PerTraining
from metafop.hypergradients.step_vjp import StepVJP
from metafop.hypergradients.validation import batch_at
from metafop.protocols import Batches, Trains
from metafop.types import Batch, Meta, Seen


class CompiledSteps:
    """Steps that torch's compiler builds, once for a training and for each form of batches.

    A step back is given what the step saw, and leaves out the gradient.
    """

    reuses_gradients = True

    def __init__(self, step_vjp: StepVJP, meta: Meta, carry: Any, batches: Batches, checked: bool) -> None:
        self.training, self.step_vjp, self.batches, self.checked = (
            step_vjp.training,
            step_vjp,
            batches,
            checked,
        )
        leaves, self._meta_structure = tree.flatten(meta)
        self._meta, self._carry_structure = Formed(leaves), tree.flatten(carry)[1]
        self._first = (meta, carry)
        self._functions: dict[tree.Structure, _Functions] = {}  # by the structure of a batch

    def start(self, carry: Any) -> Leaves:
        return Formed(tree.leaves(carry))

    def carry(self, kept: Leaves) -> Any:
        return tree.unflatten(kept, self._carry_structure)

    def start_grads(self, grads: Meta) -> Leaves:
        return [x.contiguous() for x in tree.leaves(grads)]  # as a step back returns them

    def meta_grads(self, grads: Leaves) -> Meta:
        return tree.unflatten(grads, self._meta_structure)

    def forward(self, t: int, kept: Leaves) -> tuple[Leaves, list[Tensor]]:
        batch, functions = self._at(t)
        after, seen = functions.forward(self._meta, kept, batch)
        return after, seen

    def backward(
        self, t: int, kept: Leaves, grads: Leaves, cotangent: Cotangent, seen: list[Tensor]
    ) -> tuple[Leaves, Cotangent, Tensor, list[Tensor]]:
        batch, functions = self._at(t)
        grads, cotangent, (size,), again = functions.backward(self._meta, kept, batch, grads, cotangent, seen)
        return grads, cotangent, size, again

    def _at(self, t: int) -> tuple[Leaves, _Functions]:
        """Return the leaves of a batch, and the functions for batches of its structure."""
        batch, structure = tree.flatten(batch_at(self.batches, t))
        check_compilable(batch, t)
        if structure not in self._functions:
            structures = (self._meta_structure, self._carry_structure, structure)
            key = (structures, self.step_vjp.over, self.step_vjp.depends_on_value, self.checked)
            self._functions[structure] = _functions(self.training, key)
        return channels_last(batch) if self._lays_channels_last else batch, self._functions[structure]

    @cached_property
    def _lays_channels_last(self) -> bool:
        batch = batch_at(self.batches, 0)
        shapes = tuple(x.shape if isinstance(x, Tensor) else None for x in tree.leaves(batch))
        return _channels_last(self.training, shapes, *self._first, batch)


_channels_last = PerTraining(lambda training, _, *args: takes_channels_last(training, *args))


def check_compilable(batch: Leaves, t: int) -> None:
    """Refuse a batch that holds something other than dense tensors."""
    for leaf in batch:
        if not isinstance(leaf, Tensor | None):
            raise TypeError(
                f"Adjoint(compile=True) takes batches of tensors, got {leaf!r} in that of step {t}. "
                "Wrap it: torch.tensor(...)."
            )
        if leaf is not None and leaf.layout != torch.strided:
            raise TypeError(
                f"Adjoint(compile=True) takes dense batches, got a sparse tensor in that of step {t}. "
                "Pass its to_dense(), or compile=False."
            )


class _Functions(NamedTuple):
    """forward(meta, carry, batch) -> (carry, seen)        seen = [value, *gradients, *buffers]

    backward(meta, carry, batch, grads, λ, seen) -> (grads, λ, [‖λ‖], [value again])
    """

    forward: Compiled
    backward: Compiled


def _compiled(training: Trains, key: tuple) -> _Functions:
    structures, over, depends_on_value, checked = key
    step_vjp = StepVJP(training, over, depends_on_value)

    def trees(*leaves: Leaves) -> tuple[Any, Any, Batch]:
        return tuple(map(tree.unflatten, leaves, structures))

    def forward(*leaves: Leaves) -> tuple[Leaves, ...]:
        meta, carry, batch = trees(*leaves)
        seen = training.evaluate(meta, carry, batch)
        after, _ = training.advance(meta, carry, seen)
        gradients = [part[k] for part in (seen.grads, seen.cotangent) if part for k in carry.params]
        return tree.leaves(after), [seen.value, *gradients, *(seen.buffers[k] for k in carry.buffers)]

    def backward(
        meta_leaves: Leaves, leaves: Leaves, batch: Leaves, grads: Leaves, cotangent: Leaves, kept: Leaves
    ) -> tuple[Leaves, ...]:
        meta, carry, batch = trees(meta_leaves, leaves, batch)
        seen = _unpacked(kept, carry)
        d_meta, cotangent, again = step_vjp(meta, carry, batch, cotangent, seen)
        return tree.add(grads, tree.leaves(d_meta)), cotangent, [tree.norm(cotangent)], [again.value]

    return _Functions(Compiled(forward, checked), Compiled(backward, checked))


def _unpacked(kept: Leaves, carry: Any) -> Seen:
    """Return what a step saw: the loss, its gradients, those of a validation loss if any, buffers."""
    value, *others = kept
    count, rest = len(carry.params), len(others) - len(carry.buffers)
    of_params = [dict(zip(carry.params, others[i : i + count], strict=True)) for i in range(0, rest, count)]
    buffers = dict(zip(carry.buffers, others[rest:], strict=True))
    return Seen(value, of_params[0], buffers, of_params[1] if len(of_params) > 1 else ())


# The same functions each time, so that they are compiled once.
_functions = PerTraining(_compiled)
