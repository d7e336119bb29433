"""The whole graph: all steps recorded, then one backward pass. Its memory grows with T; it is the oracle."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from metafop import tree
from metafop.hypergradients.adjoint import adjoint
from metafop.hypergradients.checks.buffers import MissedBuffers
from metafop.hypergradients.checks.hessian import second_derivative
from metafop.hypergradients.checks.leaves import look_at_leaves
from metafop.hypergradients.checks.repeat import check_repeated, repeats_after
from metafop.hypergradients.differentiation import differentiation
from metafop.hypergradients.graphs import detached, with_constant_buffers
from metafop.hypergradients.info import unroll_info
from metafop.hypergradients.outer_loss import check_dependence, check_reads_carry, value_of
from metafop.hypergradients.validation import (
    Skip,
    accepted,
    batch_at,
    check_progress,
    check_skip,
    explained_errors,
    horizon,
)
from metafop.protocols import Batches, Trains
from metafop.types import Estimate, Meta, OuterLoss, Progress, Seen


@dataclass(frozen=True)
class Autograd:
    """∂ outer_loss(step(meta, … step(meta, carry, batches[0]) …)) / ∂meta, by one graph of torch.autograd.

    Inside a transform of torch.func it is taken by torch.func.

    skip: checks to leave out, as for `Adjoint` (none).
    progress: called after each step forward, as by `Adjoint` (None).
    """

    skip: Skip = ()
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_skip("Autograd", self.skip)
        check_progress("Autograd", self.progress)

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        meta, carry = accepted(meta, carry)
        with explained_errors():
            return self._estimate(training, outer_loss, meta, carry, batches)

    def _estimate(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        steps, first = horizon(training, meta, carry, batches), batch_at(batches, 0)
        how = differentiation(training, "reverse", meta, carry, first)
        missed = MissedBuffers(training, meta, carry, steps, self.skip)
        floats, rebuild = tree.partition(carry)

        def unrolled(
            meta: Meta, start: list[Tensor]
        ) -> tuple[Tensor, tuple[Any, list[Tensor], dict[int, Any]]]:
            now, values, looked_at = rebuild(start), [], {}
            seen = seen_first = training.evaluate(meta, with_constant_buffers(now), first)
            for t in range(steps):
                if t > 0:
                    seen = training.evaluate(meta, with_constant_buffers(now), batch_at(batches, t))
                if t in missed.steps or second.is_due():
                    looked_at[t] = (now, seen)
                now, _ = training.advance(meta, with_constant_buffers(now), seen)
                values.append(seen.value)
                if self.progress is not None:
                    self.progress("forward", t + 1, steps)
                if "repeat" not in self.skip and t == repeats_after(steps):
                    _repeat_first(training, meta, rebuild(start), batches, seen_first)
            return value_of(outer_loss, meta, with_constant_buffers(now)), (now, values, looked_at)

        with how.context(), second_derivative(training, meta, "reverse", self.skip) as second:
            on_leaves = look_at_leaves(training, "reverse", self.skip, outer_loss, meta, carry, batches)
            unroll = _recorded(unrolled) if how.recordable else _transformed(unrolled)
            (grads, d_start), (value, (after, values, looked_at)) = detached(unroll(meta, floats))
            check_reads_carry(outer_loss, meta, after)
            for t, (now, seen) in looked_at.items():
                second.look(now, batch_at(batches, t))
                missed.at(t, now, batch_at(batches, t), seen)
            buffers = missed.note(partial(value_of, outer_loss, meta), after, value)
            notes = (*how.notes, *second.notes, *on_leaves, buffers)
            info = unroll_info(after, value, grads, values, notes=notes)
        if tree.is_known(value) and info["overflow"] == 0:  # a graph does not tell where it overflowed
            info = adjoint(training, outer_loss, meta, carry, batches).info
        return Estimate(value, grads, tree.derivative(carry, d_start), after, info)


Unrolled = Callable[[Meta, list[Tensor]], tuple[Tensor, Any]]
Differentiated = Callable[[Meta, list[Tensor]], tuple[tuple[Meta, list[Tensor]], tuple[Tensor, Any]]]


def _recorded(unrolled: Unrolled) -> Differentiated:
    """Return the function's derivatives in both arguments, by torch.autograd; and what it returns."""

    def differentiated(*given: Any) -> Any:
        leaves, structure = tree.flatten(given)
        inputs = [x.detach().requires_grad_() for x in leaves]
        value, besides = unrolled(*tree.unflatten(inputs, structure))
        found = torch.autograd.grad(value, inputs, allow_unused=True) if value.requires_grad else []
        check_dependence(any(d is not None for d in found))
        grads = [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, found, strict=True)]
        return tree.unflatten(grads, structure), (value, besides)

    return differentiated


def _transformed(unrolled: Unrolled) -> Differentiated:
    """Return the same by torch.func."""

    def checked(meta: Meta, start: list[Tensor]) -> tuple[Tensor, Any]:
        value, besides = unrolled(meta, start)
        check_dependence(tree.is_tracked(value))
        return value, besides

    return grad_and_value(checked, argnums=(0, 1), has_aux=True)


def _repeat_first(training: Trains, meta: Meta, start: Any, batches: Batches, seen: Seen) -> None:
    again = training.evaluate(meta, with_constant_buffers(start), batch_at(batches, 0))
    check_repeated(0, tree.leaves(seen), tree.leaves(again))


autograd = Autograd()
