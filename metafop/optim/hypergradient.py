"""The hypergradient of each M: how should the last step have been preconditioned, by the gradient after it?

    H = ∂⟨∇J(θ), θ⟩/∂M = the family's pullback of the credited gradients, at the cotangent of what they moved

The derivative is that of the pure optimizer which describes the base, the pullback that of the family, and
the divisor ‖∇J‖ ‖Δθ‖ that of `safeguards`. FOP's own is only what it reads from the optimizer's state.
"""

from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.optim import base_optimizers, state
from metafop.optim.step import GroupStep, ParamStep
from metafop.optimizers import SGD, Adam
from metafop.preconditioners import batched
from metafop.safeguards import largest_change
from metafop.types import Params


def of_preconditioners(step: GroupStep, params: list[ParamStep]) -> dict[str, list[Tensor]]:
    """Return H in the leaves of each parameter's m, for the last step it took (docs/math.md, 12 to 14)."""
    cotangents = step.cotangents(params)
    toward, divisors = _toward(step, params, cotangents)
    credited = state.MEMORY if step.rule.credit == "heavy_ball" else state.CREDIT
    pulled = batched.pullbacks(
        {one.spec.key: one.spec.family for one in params},
        {one.spec.key: one.spec.m(one.entries) for one in params},
        {one.spec.key: one.entries[credited] for one in params},
        toward,
    )
    if step.group["scale_free"]:
        # In one call for all: at the size of small networks a call takes longer than the arithmetic.
        slopes = torch._foreach_norm([cotangents[one.spec.key] for one in params])
        for one, slope, moved in zip(params, slopes, _displacements(params), strict=True):
            change = largest_change(_number(slope), _number(moved))
            divisors[one.spec.key] = divisors[one.spec.key] * change  # not in place: it may be on the CPU
    result = {}
    for one in params:
        h, divisor = pulled[one.spec.key], divisors[one.spec.key]
        result[one.spec.key] = [x / divisor for x in ([h] if isinstance(h, Tensor) else tree.leaves(h))]
    return result


def _toward(step: GroupStep, params: list[ParamStep], cotangents: Params) -> tuple[Params, dict[str, Any]]:
    """Return what to pull back to m, and by what the result is then to be divided.

    Around SGD, with or without momentum, the cotangent of the credit is a number times c. Pullbacks are
    linear, and m is smaller than θ: so c is pulled back, and the result divided by that number's inverse.
    In float64, where bits are those of `Online`, the number comes first.
    """
    first = cotangents[params[0].spec.key]
    if first.dtype is torch.float64 or isinstance(step.rule.pure, Adam):
        return cotangents_of_credit(step, params, cotangents), dict.fromkeys(cotangents, 1.0)
    if all(one.entries[state.FROM_VELOCITY] for one in params):  # of a heavy ball, for an lr of 1
        return cotangents, dict.fromkeys(cotangents, -1.0)
    dtype = torch.float64 if first.is_cpu else first.dtype  # some devices do not have float64
    ones = dict.fromkeys(cotangents, torch.ones((), dtype=dtype, device="cpu"))
    factors = cotangents_of_credit(step, params, ones)
    return cotangents, {k: 1 / _number(factor) for k, factor in factors.items()}


def cotangents_of_credit(step: GroupStep, params: list[ParamStep], cotangents: Params) -> Params:
    """Return the cotangent of P times the credited gradients: -lr c around SGD (docs/math.md, 12 and 13).

    Their lrs may differ: some may have had no gradient for a while, and a scheduler went on.
    """
    pure, dtype = step.rule.pure, cotangents[params[0].spec.key].dtype
    lrs = {one.spec.key: last_lr(one) for one in params}
    lr = lrs if len(set(lrs.values())) > 1 else lrs[params[0].spec.key]
    hyper = base_optimizers.hyper(pure, step.last_settings(), lr, dtype)
    if not isinstance(pure, Adam):
        return (pure or SGD()).toward_after(hyper, (), cotangents)  # pyright: ignore
    through = _through_both_moments if step.rule.credit == "moments" else _through_first_moment
    return {k: x for one in params for k, x in through(pure, hyper, one, cotangents).items()}


def _through_first_moment(pure: Adam, hyper: Any, one: ParamStep, cotangents: Params) -> Params:
    """Return the cotangent with the second moment held: that of the base's state after the step."""
    k = one.spec.key
    moments = base_optimizers.moments(pure, one.param, one.entries.saved)
    after = base_optimizers.pure_state(pure, k, moments, cotangents[k].dtype)
    return pure.toward_after(hyper, after, {k: cotangents[k]})


def _through_both_moments(pure: Adam, hyper: Any, one: ParamStep, cotangents: Params) -> Params:
    """Return the cotangent of the last direction, given the moments before the step."""
    k, entries = one.spec.key, one.entries
    moments = {name: entries[state.MOMENTS[name]] for name in base_optimizers.moment_names(pure)}
    before = base_optimizers.pure_state(pure, k, moments, cotangents[k].dtype)
    params = {k: base_optimizers.at_least_float32(one.param)}  # only its shape matters for this derivative
    return pure.pullback(hyper, params, before, {k: entries[state.DIRECTION]}, {k: cotangents[k]})[1]


def last_lr(one: ParamStep) -> float | Tensor:
    """Return the lr of the last step; 1 where its displacement is that of the velocity."""
    return 1.0 if one.entries[state.FROM_VELOCITY] else one.entries[state.LR]


def _displacements(params: list[ParamStep]) -> list[Tensor]:
    """Return ‖Δθ‖ of the last step of each; ‖v'‖, for an lr of 1, where it is that of the velocity."""
    by_velocity = [one.entries["momentum_buffer"] for one in params if one.entries[state.FROM_VELOCITY]]
    norms = iter(torch._foreach_norm(by_velocity) if by_velocity else ())
    return [
        next(norms) if one.entries[state.FROM_VELOCITY] else one.entries[state.DISPLACEMENT] for one in params
    ]


def _number(x: Tensor) -> Any:
    """Return a scalar as a number, or as it is where it is not to be read."""
    return x.item() if base_optimizers.is_readable(x) else x
