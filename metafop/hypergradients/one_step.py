"""The one-step hypergradient, two ways: the derivative of the step just taken, and of nothing before it."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from torch.func import vjp

from metafop.protocols import Trains
from metafop.types import Last, Meta, Params, Tree


def closed_form(training: Trains, meta: Meta, last: Last, cotangent: Params) -> Meta:
    """Return the hand-written pullback of the last step: the optimizer's, then the preconditioner's.

    training: what took the step, a `Training` or an `Online`.
    meta: where the derivative is taken.
    last: the step, with the gradients that have credit for it.
    cotangent: the gradient at the parameters after it, by name.
    """
    return training.pullback(meta, last, cotangent)


def by_autograd(training: Trains, meta: Meta, last: Last, cotangent: Params) -> Meta:
    """Return the VJP of `training.advance` in `meta`: ∂⟨cotangent, params after the last step⟩.

    With the gradient at those parameters as `cotangent` this is ∂J/∂meta, the state before the `last` step
    held fixed: what `closed_form` computes, for every optimizer and preconditioner. `last` must have no
    credit for earlier gradients. If it has what its loss was given, the gradient is taken again, for the
    derivative in its leaves; otherwise zeros stand for that. (docs/math.md, 1)
    """
    if last.credit:
        raise ValueError(
            "by_autograd differentiates the last step alone and got a credit for earlier ones. "
            'Use Online(credit="gradient") or hypergradient=closed_form.'
        )

    def params(meta: Meta, leaves: Tree) -> Params:
        seen = last.seen
        if last.given:
            seen = training.evaluate(meta._replace(loss=leaves), last.carry, last.given.batch)
        carry, _ = training.advance(meta, last.carry, seen)
        return carry.params

    leaves = last.given.leaves if last.given else ()
    d_meta, d_leaves = vjp(params, meta, leaves)[1](cotangent)
    return d_meta._replace(loss=d_leaves) if last.given else d_meta
