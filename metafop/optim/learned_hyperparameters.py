"""Learned lr and momentum: offsets in log lr and logit momentum, on top of what a user or scheduler sets.

    z' = meta_optimizer(z, ∂⟨∇J(θ), θ⟩/∂z),    the base steps with x(z(x₀) + z')    (docs/math.md, 9 and 26)

Both are learned from every step, and for all parameters of a group together.
"""

from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.optim import base_optimizers, state
from metafop.optim.meta_update import Leaf, MetaOptimizer
from metafop.optim.step import GroupStep, ParamStep
from metafop.optimizers import Positive, Unit
from metafop.safeguards import largest_change

_DOMAINS = {"lr": Positive(), "momentum": Unit()}


def learn(step: GroupStep, meta: MetaOptimizer) -> None:
    """Move the offsets by what the last step teaches, and set the values that the base is to step with."""
    names = step.rule.learned_settings
    for name in names:
        _make_entries(step, name, meta)
    before = {name: _value(step, name) for name in names}
    usable = [one for one in step.params if one.entries.get(state.USABLE_FOR_SETTINGS)]
    if usable and step.moves:
        _move(step, usable, meta)
    # In the paper's order this step is still taken with the values before.
    step.learned = {name: _value(step, name) for name in names} if step.group["order"] == "exact" else before


def keep_before(step: GroupStep) -> None:
    """Keep what the next step needs to know of the time before this one, and of its direction."""
    for one in step.params:
        one.entries[state.USABLE_FOR_SETTINGS] = int(step.moves)
        one.entries[state.BEFORE] = one.param.clone()
        step.keep_moments_and_direction(one)
    for name in {"lr", *step.rule.learned_settings}:
        value = step.settings[name]
        step.entries[state.setting_keys(name).used] = value.clone() if isinstance(value, Tensor) else value


def _make_entries(step: GroupStep, name: str, meta: MetaOptimizer) -> None:
    keys = state.setting_keys(name, meta.states)
    if keys.offset in step.group:
        return
    offset = base_optimizers.at_least_float32(step.params[0].param.new_zeros(()))
    step.entries[keys.offset], step.entries[keys.updates] = offset, 0
    for key, x in zip(keys.states, meta.init(offset), strict=True):
        step.entries[key] = x


def _value(step: GroupStep, name: str) -> Any:
    """Return x(z(x₀) + z), as a number or tensor as x₀ is; zero stays, as does all where z has no value."""
    value, offset = step.group[name], step.entries[state.setting_keys(name).offset]
    if base_optimizers.is_zero(value) or not tree.is_concrete(offset):
        return value
    start = base_optimizers.scalar(value, offset.dtype)
    moved = _DOMAINS[name].moved(start, torch.zeros_like(offset), offset)
    return moved.to(value.dtype) if isinstance(value, Tensor) else moved.item()


def _move(step: GroupStep, params: list[ParamStep], meta: MetaOptimizer) -> None:
    """Move the offsets along the derivative of the last step in log lr and logit momentum."""
    cotangents = step.cotangents(params)
    dtype = cotangents[params[0].spec.key].dtype
    settings = step.last_settings()
    hyper = base_optimizers.hyper(step.rule.pure, settings, step.group[state.setting_keys("lr").used], dtype)
    derivatives = [_derivative(step, one, hyper, cotangents) for one in params]
    names, leaves, grads = step.rule.learned_settings, [], []
    for name in names:
        keys = state.setting_keys(name, meta.states)
        h = torch.stack([getattr(d, name) for d in derivatives]).sum()
        h = _DOMAINS[name].chain(getattr(hyper, name), h)
        leaves.append(Leaf(step.entries[keys.offset], [step.entries[key] for key in keys.states]))
        grads.append(h)
    if step.group["scale_free"]:
        wide = base_optimizers.at_least_float32
        moved = tree.norm([wide(one.param) - wide(one.entries[state.BEFORE]) for one in params])
        size = largest_change(tree.norm(cotangents), moved)
        grads = [h / size for h in grads]
    new = meta.update(step.group["meta_lr"], leaves, grads)
    for name, leaf in zip(names, new, strict=True):
        keys = state.setting_keys(name, meta.states)
        step.entries[keys.offset] = leaf.value
        step.entries[keys.updates] += 1
        for key, x in zip(keys.states, leaf.state, strict=True):
            step.entries[key] = x


def _derivative(step: GroupStep, one: ParamStep, hyper: Any, cotangents: dict[str, Tensor]) -> Any:
    """Return ∂⟨∇J(θ), θ⟩ in the hyperparameters of the last step, as far as one parameter goes."""
    pure, k, entries = step.rule.pure, one.spec.key, one.entries
    assert pure is not None  # config.check_group has seen to it
    cotangent = {k: cotangents[k]}
    moments = {name: entries[state.MOMENTS[name]] for name in base_optimizers.moment_names(pure)}
    before = base_optimizers.pure_state(pure, k, moments, cotangent[k].dtype)
    params = {k: base_optimizers.at_least_float32(entries[state.BEFORE])}
    return pure.pullback(hyper, params, before, {k: entries[state.DIRECTION]}, cotangent)[0]
