"""One step of one group: learn from the last step, precondition the gradients, step the base, record.

Nothing is written into the optimizer's state before the base has stepped: a step that fails changes nothing.
(docs/math.md, 26)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from metafop import tree
from metafop.optim import base_optimizers, fused_sgd, hypergradient, learned_hyperparameters, state
from metafop.optim.meta_update import Leaf, MetaOptimizer
from metafop.optim.step import GroupStep, ParamStep
from metafop.preconditioners import batched


def learn_and_precondition(step: GroupStep, meta: MetaOptimizer) -> None:
    """Learn from the last step, and make of each gradient the direction for the base."""
    if step.rule.learned_settings:
        learned_hyperparameters.learn(step, meta)
    for one in step.preconditioned:
        if not one.entries.saved.keys() >= step.rule.needed:
            _make_entries(step, one, meta)
    if step.group["order"] == "exact":
        _learn(step, meta)
        _precondition(step)
    else:  # the paper's order: this step is still taken with the m before
        _precondition(step)
        _learn(step, meta)
    if step.moves:
        _keep_before(step)
    if step.rule.learned_settings:
        learned_hyperparameters.keep_before(step)


def step_base(base: Optimizer, steps: Sequence[GroupStep], is_part: bool) -> None:
    """Step the base with the directions; where torch's fused kernel can do it, call that.

    `is_part` says that other groups take a step without it: then, too, it sees only those that need it.
    """
    own, fused = [], []
    for step in steps:
        params, directions = [one.param for one in step.params], [one.direction for one in step.params]
        velocities = [one.entries.saved.get("momentum_buffer") for one in step.params]
        if step.rule.fused and fused_sgd.suits(params, directions, velocities):
            fused.append((step.settings, params, directions, velocities))
        else:
            own.append(step)
    is_part = is_part or bool(fused)
    if own or not is_part:  # without any gradient, too: it may have something to do at every step
        _step_own(base, own, [step.group for step in own] if is_part else base.param_groups)
    for arguments in fused:
        fused_sgd.step(*arguments)


def record(step: GroupStep, states: dict[Tensor, dict[str, Any]]) -> None:
    """Write into the state what the next step needs to know of this one, which the base has taken."""
    _accumulate_credit(step)
    for one in step.preconditioned:
        _record_last(step, one)
    step.group[state.STEPS] += 1
    step.group.update(step.entries.new)
    for one in step.params:
        _write(step, one, states)


def _make_entries(step: GroupStep, one: ParamStep, meta: MetaOptimizer) -> None:
    """Make what is missing: all, at the first step of a parameter; some, after settings have changed."""
    entries, like = one.entries, base_optimizers.at_least_float32(one.grad)
    missing = step.rule.needed.difference(entries.saved)
    if state.USABLE in missing:
        for i, leaf in enumerate(tree.leaves(one.spec.start(one.param))):
            entries[one.spec.m_keys[i]] = leaf.contiguous()
            for key, x in zip(state.meta_keys(i, meta.states), meta.init(leaf), strict=True):
                entries[key] = x.contiguous()
        entries[state.UPDATES], entries[state.NEXT] = 0, _next_time(step)
        entries[state.LR], entries[state.FROM_VELOCITY] = 0.0, 0
        entries[state.DISPLACEMENT] = like.new_zeros(())
    entries[state.USABLE] = 0
    for key in missing & {state.CREDIT, state.MEMORY, state.DIRECTION}:
        entries[key] = torch.zeros_like(like, memory_format=torch.contiguous_format)
    for name, x in base_optimizers.moments(step.rule.pure, one.param, {}).items():
        if state.MOMENTS[name] in missing:
            entries[state.MOMENTS[name]] = x


def _next_time(step: GroupStep) -> int:
    """Return the next step in which to learn: a multiple of the interval."""
    time, interval = step.group[state.STEPS], step.group["interval"]
    return time - time % interval + interval


def _learn(step: GroupStep, meta: MetaOptimizer) -> None:
    """Move the m of each parameter that is due by what its last step teaches."""
    due = [one for one in step.preconditioned if _is_due(step, one)] if step.moves else []
    if not due:
        return
    found = hypergradient.of_preconditioners(step, due)
    places, leaves, grads = [], [], []
    for one in due:
        for i, h in enumerate(found[one.spec.key]):
            key, meta_keys = one.spec.m_keys[i], state.meta_keys(i, meta.states)
            if one.spec.learned[i]:
                places.append((one.entries, key, meta_keys))
                leaves.append(Leaf(one.entries[key], [one.entries[k] for k in meta_keys]))
                grads.append(h)
            else:  # the time of a `Rescaled` family
                one.entries[key] = one.entries[key] + 1
        one.entries[state.UPDATES] += 1
        one.entries[state.NEXT] = _next_time(step)
    moved = meta.update(step.group["meta_lr"], leaves, grads) if leaves else []
    for (entries, key, meta_keys), leaf in zip(places, moved, strict=True):
        entries[key] = leaf.value
        entries.new.update(zip(meta_keys, leaf.state, strict=True))


def _is_due(step: GroupStep, one: ParamStep) -> bool:
    """Return whether the parameter is to learn now, and its last step can be learned from."""
    entries = one.entries
    if not entries[state.USABLE] or step.group[state.STEPS] < entries[state.NEXT]:
        return False
    # The velocity tells nothing of the lr, and anyone may have reset it.
    has_velocity = step.group["scale_free"] and entries.get("momentum_buffer") is not None
    return has_velocity or not entries[state.FROM_VELOCITY]


def _precondition(step: GroupStep) -> None:
    """Give each parameter its direction P g."""
    functions = batched.preconditioner_functions(
        {one.spec.key: one.spec.family for one in step.preconditioned},
        {one.spec.key: one.spec.m(one.entries) for one in step.preconditioned},
        {one.spec.key: one.grad for one in step.preconditioned},
    )
    for one in step.preconditioned:
        one.function = functions[one.spec.key]
        one.direction = like_gradient(one.spec, one.grad, one.function(one.grad))


def like_gradient(spec: state.ParamSpec, grad: Tensor, direction: Tensor) -> Tensor:
    """Return P g in the gradient's memory layout: fused kernels assume it, and do not check."""
    if direction.shape != grad.shape or direction.dtype is not grad.dtype:
        raise RuntimeError(
            f"{spec.family} of {spec.name!r} makes {direction.dtype}, {tuple(direction.shape)}, "
            f"of a gradient of {grad.dtype}, {tuple(grad.shape)}. "
            "Let its apply return something like the gradient."
        )
    if direction.stride() != grad.stride():
        return torch.empty_like(grad).copy_(direction)
    return direction


def _keep_before(step: GroupStep) -> None:
    """Keep what is to be known of the time before this step, where the next one may learn from it."""
    if step.rule.displacement == "velocity":
        for one in step.preconditioned:
            one.is_recorded = True
        return
    for one in step.preconditioned:
        if step.group[state.STEPS] + 1 >= one.entries[state.NEXT]:
            one.is_recorded = True
            one.before = one.param.clone()
            if step.rule.credit == "moments":
                step.keep_moments_and_direction(one)


def _step_own(base: Optimizer, steps: Sequence[GroupStep], groups: list[dict[str, Any]]) -> None:
    """Step the base with the directions in place of the gradients, which are the user's and come back."""
    params = [one for step in steps for one in step.preconditioned]
    settings = [(step.group, {name: step.group[name] for name in step.learned}) for step in steps]
    all_groups, base.param_groups = base.param_groups, groups
    try:
        for one in params:
            one.param.grad = one.direction
        for step in steps:
            step.group.update(step.learned)
        # What its class defines, without the hooks that torch puts around it: they run for FOP.
        type(base).step.__wrapped__(base)  # pyright: ignore
    finally:
        base.param_groups = all_groups
        for one in params:
            one.param.grad = one.grad
        for group, old in settings:
            group.update(old)


def _accumulate_credit(step: GroupStep) -> None:
    """Bring up to date what the base's velocity is made of (docs/math.md, 12 and 13)."""
    rule, settings = step.rule, step.settings
    if rule.credit == "heavy_ball":
        momentum = float(settings["momentum"])
        for one in step.preconditioned:
            grad = base_optimizers.at_least_float32(base_optimizers.to_minimize(step.group, one.grad))
            fused_sgd.add_to_credit(one.entries[state.MEMORY], grad, momentum)
    elif rule.credit == "average" and step.preconditioned:
        grads = step.cotangents(step.preconditioned)
        memory = {one.spec.key: one.entries[state.MEMORY] for one in step.preconditioned}
        dtype = grads[step.preconditioned[0].spec.key].dtype
        hyper = base_optimizers.hyper_of_credit(rule.pure, settings, dtype)
        made: Any = rule.pure.credit(hyper, memory, grads)  # pyright: ignore
        credit, memory = made
        for one in step.preconditioned:
            one.entries[state.MEMORY] = memory[one.spec.key]
            if one.is_recorded:
                one.entries[state.CREDIT] = credit[one.spec.key]


def _record_last(step: GroupStep, one: ParamStep) -> None:
    """Record this step as the last one, if the next one may learn from it."""
    entries, wide, lr = one.entries, base_optimizers.at_least_float32, step.settings["lr"]
    entries[state.USABLE] = int(one.is_recorded)
    if not one.is_recorded:
        return
    entries[state.FROM_VELOCITY] = int(one.before is None)
    if one.before is None:
        return
    entries[state.LR] = lr.clone() if isinstance(lr, Tensor) else lr
    entries[state.DISPLACEMENT] = torch.linalg.vector_norm(wide(one.before) - wide(one.param))
    if step.rule.credit in ("gradient", "moments"):
        entries[state.CREDIT] = wide(base_optimizers.to_minimize(step.group, one.grad)).clone()


def _write(step: GroupStep, one: ParamStep, states: dict[Tensor, dict[str, Any]]) -> None:
    """Write the entries of a parameter, and drop those that steps of this kind do not keep up to date."""
    entries, unused = one.entries, step.rule.unused
    if not step.rule.learns_precond and entries.get(state.USABLE):
        entries[state.USABLE] = 0  # P had no part in this step
    if entries.new:
        states[one.param].update(entries.new)
    if not unused.isdisjoint(entries.saved):
        for key in unused:
            states[one.param].pop(key, None)
