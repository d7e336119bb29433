"""The hypergradient of each M: how should the last step have been preconditioned, by the gradient after it?

    H = ∂⟨∇J(θ), θ⟩/∂M = the family's pullback of the credited gradients, at the cotangent of what they moved

The derivative is that of the pure optimizer which describes the base, the pullback that of the family, and the
division by ‖∇J‖ ‖Δθ‖ that of `safeguards`: nothing here is FOP's own but what is read from the optimizer's state.
"""

from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.optim import base_optimizers, state
from metafop.optim.step import GroupStep, ParamStep
from metafop.optimizers import SGD, Adam
from metafop.preconditioners import stacks
from metafop.safeguards import free_of_scale
from metafop.types import Params, Tree


def of_preconditioners(step: GroupStep, params: list[ParamStep]) -> dict[str, Tree]:
    """Return H in the m of each parameter, by the last step that it took (docs/math.md, 12 to 14)."""
    cotangents = step.cotangents(params)
    credited = state.MEMORY if step.rule.credit == "heavy_ball" else state.CREDIT
    pulled = stacks.pullbacks(
        {one.spec.key: one.spec.family for one in params},
        {one.spec.key: one.spec.m(one.entries) for one in params},
        {one.spec.key: one.entries[credited] for one in params},
        cotangents_of_credit(step, params, cotangents),
    )
    if not step.group["scale_free"]:
        return pulled
    result = {}
    for one in params:
        # In float64, where the product of two small norms does not underflow.
        sizes = [norm.double() for norm in (_norm(cotangents[one.spec.key]), displacement(one))]
        result[one.spec.key] = tree.map(lambda h, sizes=sizes: free_of_scale(h, *sizes), pulled[one.spec.key])
    return result


def cotangents_of_credit(step: GroupStep, params: list[ParamStep], cotangents: Params) -> Params:
    """Return the cotangent of P times the credited gradients: -lr c around SGD (docs/math.md, 12 and 13).

    Each parameter has its own lr: some may have had no gradient for a while, and a scheduler went on.
    """
    pure, dtype = step.rule.pure, cotangents[params[0].spec.key].dtype
    lrs = {one.spec.key: last_lr(one) for one in params}
    hyper = base_optimizers.hyper(pure, step.last_settings(), lrs, dtype)
    if not isinstance(pure, Adam):
        return (pure or SGD()).toward_after(hyper, (), cotangents)  # pyright: ignore
    through = _through_both_moments if step.rule.credit == "moments" else _through_first_moment
    return {k: x for one in params for k, x in through(pure, hyper, one, cotangents).items()}


def _through_first_moment(pure: Adam, hyper: Any, one: ParamStep, cotangents: Params) -> Params:
    """Return the cotangent with the second moment held, which is read from the base's state after the step."""
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


def displacement(one: ParamStep) -> Tensor:
    """Return ‖Δθ‖ of the last step; ‖v'‖, for an lr of 1, where it is that of the velocity."""
    if one.entries[state.FROM_VELOCITY]:
        return _norm(one.entries["momentum_buffer"])
    return one.entries[state.DISPLACEMENT]


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x)
