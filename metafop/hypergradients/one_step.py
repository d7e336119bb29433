"""The one-step hypergradient by autograd: the derivative of the step just taken, and nothing before it."""

from dataclasses import dataclass
from typing import Any

from torch.func import vjp

from metafop import tree
from metafop.training import Training
from metafop.types import Info, Last, Meta, Params, Seen, Trains, Tree


def one_step(training: Trains, meta: Meta, last: Last, cotangent: Params) -> Meta:
    """Return the VJP of `advance` in meta: ∂⟨cotangent, params after the last step⟩ (docs/math.md, 1).

    With the gradient at those parameters as cotangent this is ∂J/∂meta, the last state held fixed. It is what
    `training.pullback` computes in closed form, for every optimizer and preconditioner, credit left aside.
    """

    def params(meta: Meta) -> Params:
        carry, _ = training.advance(meta, last.carry, last.seen)
        return carry.params

    _, pull = vjp(params, meta)
    return pull(cotangent)[0]
