"""The whole graph: all steps recorded, then one sweep back. Its memory grows with T; it is the oracle."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.func import grad_and_value

from metafop import tree
from metafop.hypergradients.adjoint import adjoint
from metafop.hypergradients.findings import findings
from metafop.hypergradients.first_look import first_look
from metafop.hypergradients.missed import Missed
from metafop.hypergradients.repeated import check_repeated, repeats_after
from metafop.hypergradients.second_derivative import second_derivative
from metafop.hypergradients.unroll import (
    Skip,
    apart,
    batch_at,
    check_dependence,
    check_skip,
    estimating,
    held,
    horizon,
    outer_value,
)
from metafop.types import Batches, Estimate, Meta, OuterLoss, Trains


@dataclass(frozen=True)
class Autograd:
    """∂ outer_loss(step(meta, … step(meta, carry, batches[0]) …)) / ∂meta, by torch.func.grad.

    `skip` names checks to leave out, as for `Adjoint`.
    """

    skip: Skip = ()

    def __post_init__(self) -> None:
        check_skip("Autograd", self.skip)

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        meta, carry = apart((meta, carry))
        with estimating():
            return self._estimate(training, outer_loss, meta, carry, batches)

    def _estimate(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        steps, first = horizon(training, meta, carry, batches), batch_at(batches, 0)
        look = first_look(training, "reverse", carry, first)
        missed = Missed(training, carry, steps, self.skip)

        def unrolled(meta: Meta) -> tuple[Tensor, tuple[Any, list[Tensor], dict[int, Any]]]:
            now, values, looked_at, places = carry, [], {}, frozenset()
            seen = seen_first = training.evaluate(held(now), first)
            for t in range(steps):
                if t > 0:
                    seen = training.evaluate(held(now), batch_at(batches, t))
                if t in missed.steps or second.places != places:
                    looked_at[t], places = now, second.places
                now, _ = training.advance(meta, held(now), seen)
                values.append(seen.value)
                if t == repeats_after(steps, self.skip):
                    again = training.evaluate(carry, batch_at(batches, 0))
                    check_repeated(0, tree.leaves(seen_first), tree.leaves(again))
            value = outer_value(outer_loss, held(now))
            check_dependence(tree.is_tracked(value))
            return value, (now, values, looked_at)

        with look.operations(), second_derivative(training, "reverse", self.skip) as second:
            unroll = grad_and_value(unrolled, has_aux=True)
            grads, (value, (after, values, looked_at)) = apart(unroll(meta))
            for t, now in looked_at.items():
                second.at(now, batch_at(batches, t))
                missed.at(t, now, batch_at(batches, t), [values[t]])
            notes = (*look.notes, *second.notes, missed.note(outer_loss, after, value))
            info = findings(after, value, grads, values, notes=notes)
        if not tree.is_transforming() and info["overflow"] == 0:  # a graph does not tell where it overflowed
            info = adjoint(training, outer_loss, meta, carry, batches).info
        return Estimate(value, grads, after, info)


autograd = Autograd()
