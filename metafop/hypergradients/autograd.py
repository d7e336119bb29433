"""The whole graph: all steps recorded, then one sweep back. Its memory grows with T; it is the oracle."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from typing import Any

from torch import Tensor
from torch.func import grad_and_value

from metafop import tree
from metafop.hypergradients.adjoint import adjoint
from metafop.hypergradients.findings import findings
from metafop.hypergradients.unroll import (
    apart,
    batch_at,
    check_dependence,
    held,
    horizon,
    outer_value,
    unfused,
)
from metafop.types import Batches, Estimate, Meta, OuterLoss, Trains


def autograd(training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches) -> Estimate:
    """Return ∂ outer_loss(step(meta, … step(meta, carry, batches[0]) …)) / ∂meta, by torch.func.grad."""
    steps, (meta, carry) = horizon(training, meta, carry, batches), apart((meta, carry))

    def unrolled(meta: Meta) -> tuple[Tensor, tuple[Any, list[Tensor]]]:
        now, values = carry, []
        for t in range(steps):
            seen = training.evaluate(held(now), batch_at(batches, t))
            now, _ = training.advance(meta, held(now), seen)
            values.append(seen.value)
        value = outer_value(outer_loss, held(now))
        check_dependence(tree.is_tracked(value))
        return value, (now, values)

    with unfused():
        grads, (value, (after, values)) = grad_and_value(unrolled, has_aux=True)(meta)
        info = findings(training, outer_loss, batches, carry, after, value, grads, values)
    if not tree.is_transforming() and info["overflow"] == 0:  # a graph does not tell where it overflowed
        info = adjoint(training, outer_loss, meta, carry, batches).info
    return Estimate(value, grads, after, info)
