"""One step of one group: learn from the last step, precondition the gradients, step the base, record the step.

Nothing is written into the optimizer's state before the base has stepped, so that a step that fails leaves all
as it was. (docs/math.md, 26)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from metafop import tree
from metafop.optim import base_optimizers, fused_sgd, hypergradient, learned_hyperparameters, state
from metafop.optim.meta_update import Leaf, MetaOptimizer
from metafop.optim.step import GroupStep, ParamStep
from metafop.preconditioners import stacks


class PreconditionerFunction(NamedTuple):
    """What makes P g of g, and what it was made of: it serves until m, or the precision of g, is another."""

    m: list[Tensor]
    dtype: torch.dtype
    call: Callable[[Tensor], Tensor]


Functions = dict[Tensor, PreconditionerFunction]


def learn_and_precondition(step: GroupStep, meta: MetaOptimizer, functions: Functions) -> None:
    """Learn from the last step, and make of each gradient the direction for the base."""
    learned_hyperparameters.learn(step, meta)
    for one in step.preconditioned:
        _make_entries(step, one, meta)
    if step.group["order"] == "exact":
        _learn(step, meta)
        _precondition(step, functions)
    else:  # the paper's order: this step is still taken with the m before
        _precondition(step, functions)
        _learn(step, meta)
    _keep_before(step)
    learned_hyperparameters.keep_before(step)


def step_base(base: Optimizer, steps: Sequence[GroupStep]) -> None:
    """Step the base with the directions; where torch's fused kernel can do it, call that."""
    fused, own = [], []
    for step in steps:
        (fused if _is_fused(step) else own).append(step)
    if own or not fused:
        _step_own(base, own, [step.group for step in own] if fused else base.param_groups)
    for step in fused:
        params, directions = [one.param for one in step.params], [one.direction for one in step.params]
        fused_sgd.step(step.settings, params, directions, _velocities(step))  # pyright: ignore


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
    entries, rule = one.entries, step.rule
    like = base_optimizers.at_least_float32(one.grad)
    if entries.get(state.USABLE) is None:
        for i, leaf in enumerate(tree.leaves(one.spec.start(one.param))):
            entries[state.m_key(i)] = leaf.contiguous()
            for j, x in enumerate(meta.init(leaf)):
                entries[state.meta_key(i, j)] = x.contiguous()
        entries[state.UPDATES], entries[state.USABLE], entries[state.FROM_VELOCITY] = 0, 0, 0
        entries[state.NEXT] = _next_time(step)
        entries[state.LR], entries[state.DISPLACEMENT] = 0.0, like.new_zeros(())
    for key in rule.kept_for_credit:
        if entries.get(key) is None:
            entries[state.USABLE] = 0
            entries[key] = torch.zeros_like(like, memory_format=torch.contiguous_format)
    if rule.credit == "moments" and entries.get(state.MOMENTS["time"]) is None:
        for name, x in base_optimizers.moments(rule.pure, one.param, {}).items():
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
    places: list[tuple[ParamStep, int]] = []
    leaves, grads = [], []
    for one in due:
        for i, (h, is_learned) in enumerate(
            zip(tree.leaves(found[one.spec.key]), one.spec.learned, strict=True)
        ):
            m = one.entries[state.m_key(i)]
            if is_learned:
                places.append((one, i))
                leaves.append(Leaf(m, [one.entries[state.meta_key(i, j)] for j in range(meta.states)]))
                grads.append(h)
            else:  # the time of a `Rescaled` family
                one.entries[state.m_key(i)] = m + 1
        one.entries[state.UPDATES] += 1
        one.entries[state.NEXT] = _next_time(step)
    if not leaves:
        return
    for (one, i), new in zip(places, meta.update(step.group["meta_lr"], leaves, grads), strict=True):
        one.entries[state.m_key(i)] = new.value
        for j, x in enumerate(new.state):
            one.entries[state.meta_key(i, j)] = x


def _is_due(step: GroupStep, one: ParamStep) -> bool:
    """Return whether the parameter is to learn now, and its last step can be learned from."""
    entries = one.entries
    if not entries[state.USABLE] or step.group[state.STEPS] < entries[state.NEXT]:
        return False
    # The velocity tells nothing of the lr, and anyone may have reset it.
    has_velocity = step.group["scale_free"] and entries.get("momentum_buffer") is not None
    return has_velocity or not entries[state.FROM_VELOCITY]


def _precondition(step: GroupStep, functions: Functions) -> None:
    """Give each parameter its direction P g."""
    ms = {
        one.spec.key: [one.entries[state.m_key(i)] for i in range(len(one.spec.shapes))]
        for one in step.preconditioned
    }
    stale = [
        one
        for one in step.preconditioned
        if not _is_current(functions.get(one.param), ms[one.spec.key], one.grad)
    ]
    if stale:
        made = stacks.turners(
            {one.spec.key: one.spec.family for one in stale},
            {one.spec.key: one.spec.m(one.entries) for one in stale},
            {one.spec.key: one.grad for one in stale},
        )
        for one in stale:
            key = one.spec.key
            functions[one.param] = PreconditionerFunction(ms[key], one.grad.dtype, made[key])
    for one in step.preconditioned:
        one.direction = _like_gradient(one, functions[one.param].call(one.grad))


def _is_current(function: PreconditionerFunction | None, m: list[Tensor], grad: Tensor) -> bool:
    if function is None or function.dtype is not grad.dtype:
        return False
    return all(x is y for x, y in zip(function.m, m, strict=True))


def _like_gradient(one: ParamStep, direction: Tensor) -> Tensor:
    """Return P g in the gradient's memory layout: fused kernels assume it, and do not check."""
    grad = one.grad
    if direction.shape != grad.shape or direction.dtype is not grad.dtype:
        raise RuntimeError(
            f"{one.spec.family} of {one.spec.name!r} makes {direction.dtype}, {tuple(direction.shape)}, "
            f"of a gradient of {grad.dtype}, {tuple(grad.shape)}. "
            "Let its apply return something like the gradient."
        )
    if direction.stride() != grad.stride():
        return torch.empty_like(grad).copy_(direction)
    return direction


def _keep_before(step: GroupStep) -> None:
    """Keep what is to be known of the time before this step, where the next one may learn from it."""
    rule, soon = step.rule, step.group[state.STEPS] + 1
    if not step.moves:
        return
    for one in step.preconditioned:
        if rule.displacement == "velocity":
            one.is_recorded = True
        elif soon >= one.entries[state.NEXT]:
            one.is_recorded = True
            one.before = one.param.clone()
            if rule.credit == "moments":
                step.keep_moments_and_direction(one)


def _is_fused(step: GroupStep) -> bool:
    if not step.rule.fused:
        return False
    return fused_sgd.suits(
        [one.param for one in step.params], [one.direction for one in step.params], _velocities(step)
    )


def _velocities(step: GroupStep) -> list[Tensor | None]:
    return [one.entries.get("momentum_buffer") for one in step.params]


def _step_own(base: Optimizer, steps: Sequence[GroupStep], groups: list[dict[str, Any]]) -> None:
    """Step the base with the directions in place of the gradients, which are the user's and come back."""
    params = [one for step in steps for one in step.params]
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
        hyper = base_optimizers.hyper(rule.pure, settings, settings["lr"], dtype)
        credit, memory = rule.pure.credit(hyper, memory, grads)  # pyright: ignore
        for one in step.preconditioned:
            one.entries[state.MEMORY] = memory[one.spec.key]
            if one.is_recorded:
                one.entries[state.CREDIT] = credit[one.spec.key]


def _record_last(step: GroupStep, one: ParamStep) -> None:
    """Record this step as the last one, if the next one may learn from it."""
    entries = one.entries
    entries[state.USABLE] = int(one.is_recorded)
    if not one.is_recorded:
        return
    lr = step.settings["lr"]
    entries[state.LR] = lr.clone() if isinstance(lr, Tensor) else lr
    entries[state.FROM_VELOCITY] = int(step.rule.displacement == "velocity")
    wide = base_optimizers.at_least_float32
    if one.before is not None:
        entries[state.DISPLACEMENT] = torch.linalg.vector_norm(wide(one.before) - wide(one.param))
    if step.rule.credit in ("gradient", "moments"):
        entries[state.CREDIT] = wide(base_optimizers.to_minimize(step.group, one.grad)).clone()


def _write(step: GroupStep, one: ParamStep, states: dict[Tensor, dict[str, Any]]) -> None:
    """Write the entries of a parameter, and drop those that steps of this kind do not keep up to date."""
    entries = one.entries
    if not step.rule.learns_precond and entries.get(state.USABLE):
        entries[state.USABLE] = 0  # P had no part in this step
    saved = states[one.param] if entries.new else states.get(one.param, {})
    saved.update(entries.new)
    for key in step.rule.unused:
        saved.pop(key, None)
