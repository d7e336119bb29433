"""The steps of an unroll, forward and back, compiled: on lists of leaves, which are faster than trees."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Generator, Tensor

from metafop import tree
from metafop.hypergradients.channels_last import channels_last, takes_channels_last
from metafop.hypergradients.checks.hessian import noise
from metafop.hypergradients.compiled import Compiled, Formed, Groups, Leaves, Second
from metafop.hypergradients.outer_loss import Cotangent
from metafop.hypergradients.per_training_cache import PerTraining
from metafop.hypergradients.recorded_step import recorded
from metafop.hypergradients.step_vjp import StepVJP
from metafop.hypergradients.validation import batch_at
from metafop.protocols import Batches, Trains
from metafop.types import Meta, Seen


class CompiledSteps:
    """Steps that torch's compiler builds, once for a training and for each form of batches.

    A step and its step back are one graph, cut in two: what the step back needs of the step is kept.
    """

    evaluates_again = False

    def __init__(
        self,
        step_vjp: StepVJP,
        recordable: bool,
        meta: Meta,
        carry: Any,
        batches: Batches,
        checked: bool,
    ) -> None:
        self.training, self.batches = step_vjp.training, batches
        self._key = (step_vjp.over, step_vjp.depends_on_value, recordable, checked)
        leaves, self._meta_structure = tree.flatten(meta)
        self._meta, self._carry_structure = Formed(leaves), tree.flatten(carry)[1]
        self._first = (meta, carry)
        self._functions: dict[tree.Structure, Compiled] = {}  # by the structure of a batch

    @property
    def bytes_recorded(self) -> int:
        batch, compiled = self._at(0)
        carry = self.start(self._first[1])
        return tree.size(self._first[1]) + compiled.build(self._meta, carry, Formed(batch)).bytes_kept

    def start(self, carry: Any) -> Formed:
        return Formed(tree.leaves(carry))

    def carry(self, kept: Leaves) -> Any:
        return tree.unflatten(kept, self._carry_structure)

    def start_grads(self, grads: Meta) -> Formed:
        return Formed(x.contiguous() for x in tree.leaves(grads))

    def meta_grads(self, grads: Leaves) -> Meta:
        return tree.unflatten(grads, self._meta_structure)

    def forward(self, t: int, kept: Leaves) -> tuple[Leaves, list[Tensor], Second]:
        batch, compiled = self._at(t)
        (after, seen), second = compiled(self._meta, kept, batch)
        return after, seen, second

    def backward(
        self, t: int, kept: Leaves, record: Second, grads: Leaves, cotangent: Cotangent
    ) -> tuple[Leaves, Cotangent, Tensor, list[Tensor]]:
        grads, cotangent, (size,) = record(grads, cotangent)
        return grads, cotangent, size, []

    def _at(self, t: int) -> tuple[Leaves, Compiled]:
        """Return the leaves of a batch, and the function for batches of its structure."""
        batch, structure = tree.flatten(batch_at(self.batches, t))
        check_compilable(batch, t)
        if structure not in self._functions:
            structures = (self._meta_structure, self._carry_structure, structure)
            key = (structures, *self._key)
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


def _compiled(training: Trains, key: tuple) -> Compiled:
    """Return (meta, carry, batch), (grads, λ) -> (carry, seen), (grads, λ, [‖λ‖]), compiled."""
    structures, over, depends_on_value, recordable, checked = key
    step_vjp = StepVJP(training, over, depends_on_value)

    def step(given: Groups, later: Groups) -> tuple[Groups, Groups]:
        meta, carry, batch = map(tree.unflatten, given, structures)
        grads, cotangent = later
        if recordable:
            after, seen, graph = recorded(training, meta, carry, batch)
            pulled = graph.pull(cotangent)
        else:
            seen = training.evaluate(meta, carry, batch)
            after, _ = training.advance(meta, carry, seen)
            d_meta, d_carry, _ = step_vjp(meta, carry, batch, cotangent, seen)
            pulled = [*tree.leaves(d_meta), *d_carry]
        grads = [g if d is None else g + d for g, d in zip(grads, pulled, strict=False)]
        cotangent = [
            torch.zeros_like(c) if d is None else d.contiguous()
            for c, d in zip(cotangent, pulled[len(grads) :], strict=True)
        ]
        return (tree.leaves(after), _listed(seen)), (grads, cotangent, [tree.norm(cotangent)])

    def later(given: Groups) -> Groups:
        """Return zeros for what the derivative in meta is so far, and random numbers for λ."""
        meta, carry, _ = given
        rng = Generator().manual_seed(0)
        floats = [x for x in carry if x.is_floating_point()]
        return [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in meta], [
            noise(x, rng) for x in floats
        ]

    return Compiled(step, later, checked)


def _listed(seen: Seen) -> list[Tensor]:
    """Return the loss and, where the gradient may depend on buffers, the gradients: it is looked whether."""
    if not any(map(tree.is_inexact, seen.buffers.values())):
        return [seen.value]
    return [seen.value, *seen.grads.values()]


# The same function each time, so that it is compiled once.
_functions = PerTraining(_compiled)
