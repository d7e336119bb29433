"""The one-step hypergradient, two ways: the derivative of the step just taken, and of nothing before it."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from metafop import tree
from metafop.norms import NormsWrittenOut
from metafop.protocols import Trains
from metafop.twice_differentiable import TwiceDifferentiable
from metafop.types import Last, Meta, Params


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
    held fixed: what `closed_form` computes, for every optimizer and preconditioner. If `last` has what its
    loss was given, that is evaluated again, and leaves of the loss have their derivative by way of the
    gradient. `last` must have no credit for earlier gradients. (docs/math.md, 1)
    """
    if last.credit:
        raise ValueError(
            "by_autograd differentiates the last step alone and got a credit for earlier ones. "
            'Use Online(credit="gradient") or hypergradient=closed_form.'
        )
    given = last.given

    def params(meta: Meta) -> Params:
        seen = last.seen
        if given:
            with TwiceDifferentiable(), NormsWrittenOut():
                seen = seen._replace(grads=training.evaluate(meta, last.carry, given.batch).grads)
        carry, _ = training.advance(meta, last.carry, seen)
        return carry.params

    return tree.pull(params, meta._replace(loss=given.leaves) if given else meta, cotangent)
