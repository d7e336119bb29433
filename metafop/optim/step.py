"""What one step of a group works on: the rule by which it steps, and its parameters with their gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from metafop.optim import base_optimizers, config, fused_sgd, state
from metafop.optim.base_optimizers import Pure
from metafop.optim.state import Entries, ParamSpec
from metafop.optimizers import SGD, Adam, Momentum

Credit = Literal["gradient", "moments", "heavy_ball", "average"]
Displacement = Literal["copy", "velocity"]

_KEPT_FOR_CREDIT: dict[Credit, tuple[str, ...]] = {
    "gradient": (state.CREDIT,),
    "moments": (state.CREDIT, state.DIRECTION),
    "heavy_ball": (state.MEMORY,),
    "average": (state.CREDIT, state.MEMORY),
}


@dataclass(frozen=True)
class StepRule:
    """How a group steps and learns, found once for its settings.

    `pure` is the pure optimizer whose derivative is taken; None for a base that is not known, around which it
    is that of gradient descent. `credit` is what P is credited with:

    - "gradient": the last gradient;
    - "moments": the same around Adam, through both of its moments, which are kept from before the step;
    - "heavy_ball": u' = g + momentum u, for the velocity is P u' (docs/math.md, 12);
    - "average": around Nesterov's momentum and Adam, what they make of such a u (docs/math.md, 12 and 13).

    `displacement` is where ‖Δθ‖ comes from: a "copy" of θ, made before a step that the next one is to learn
    from; or the "velocity" v' of a heavy ball, for Δθ = -lr v' to rounding. `fused` says that torch's fused
    kernel may take the base's step. `needed` are the entries without which a parameter that has a P cannot
    take such a step. `unused` are those that such steps do not keep up to date, and therefore drop.
    """

    pure: Pure | None
    learns_precond: bool
    learned_settings: tuple[str, ...]
    credit: Credit
    displacement: Displacement
    fused: bool
    needed: frozenset[str]
    unused: frozenset[str]


@lru_cache(maxsize=64)
def step_rule(
    pure: Pure | None,
    learn: tuple[str, ...],
    credit: Literal["velocity", "gradient"],
    scale_free: bool,
    single: bool,
    fused: bool,
) -> StepRule:
    """Return the rule for these settings; `single` says that all parameters are in float32."""
    case: Credit
    if isinstance(pure, Adam):
        case = "moments" if credit == "gradient" else "average"
    elif credit == "gradient" or pure is None or isinstance(pure, SGD):
        case = "gradient"
    else:
        case = "average" if pure.nesterov else "heavy_ball"
    # What is scale-free does not depend on lr, so that the velocity tells all. In float64 bits are Online's.
    from_velocity = case == "heavy_ball" and scale_free and single
    settings = tuple(name for name in learn if name != "precond")
    moments = {state.MOMENTS[name] for name in base_optimizers.moment_names(pure)}
    for_credit = set(_KEPT_FOR_CREDIT[case]) | (moments if case == "moments" else set())
    for_settings = {state.USABLE_FOR_SETTINGS, state.BEFORE, state.DIRECTION, *moments}
    used = (for_credit if "precond" in learn else set()) | (for_settings if settings else set())
    return StepRule(
        pure=pure,
        learns_precond="precond" in learn,
        learned_settings=settings,
        credit=case,
        displacement="velocity" if from_velocity else "copy",
        fused=fused and isinstance(pure, Momentum),
        needed=frozenset({state.USABLE, *for_credit}),
        unused=frozenset(state.TRANSIENT) - used,
    )


class ParamStep:
    """One parameter in one step of its group: its gradient g, and `direction`, P g once that is made.

    `function` makes P g of g. `is_recorded` says that the next step may learn from this one; `before` is then
    a copy of the parameter before it, if its displacement is measured.
    """

    def __init__(self, param: Tensor, grad: Tensor, spec: ParamSpec, saved: Mapping[str, Any]) -> None:
        self.param, self.grad, self.direction, self.spec = param, grad, grad, spec
        self.entries = Entries(saved)
        self.function: Callable[[Tensor], Tensor] | None = None
        self.before: Tensor | None = None
        self.is_recorded = False


@dataclass
class GroupStep:
    """One step of one group, with all of its parameters that have a gradient."""

    group: dict[str, Any]
    rule: StepRule
    params: list[ParamStep]
    preconditioned: list[ParamStep]  # those that have a P
    entries: Entries  # of the group
    learned: dict[str, Any] = field(default_factory=dict)  # lr and momentum as learned, where they are

    @property
    def settings(self) -> dict[str, Any]:
        """The group's settings as the base is to step with them."""
        return {**self.group, **self.learned} if self.learned else self.group

    @property
    def moves(self) -> bool:
        """Whether the parameters will move: a step of lr zero teaches nothing."""
        return not base_optimizers.is_zero(self.group["lr"])

    def last_setting(self, name: str) -> Any:
        """Return a setting as it was in the last step."""
        used = self.group.get(state.setting_keys(name).used) if name in self.rule.learned_settings else None
        return self.group[name] if used is None else used

    def last_settings(self) -> dict[str, Any]:
        """Return the group's settings as they were in the last step, where they are learned."""
        return {**self.group, **{name: self.last_setting(name) for name in self.rule.learned_settings}}

    def keep_moments_and_direction(self, one: ParamStep) -> None:
        """Keep the base's moments before this step, and the direction it is about to be stepped with."""
        pure = self.rule.pure
        for name, x in base_optimizers.moments(pure, one.param, one.entries.saved).items():
            one.entries[state.MOMENTS[name]] = x.clone()
        direction = base_optimizers.effective_direction(pure, self.group, one.direction, one.param)
        one.entries[state.DIRECTION] = base_optimizers.at_least_float32(direction).clone()

    def cotangents(self, params: list[ParamStep]) -> dict[str, Tensor]:
        """Return ∇J(θ) of what is minimized, by parameter: the cotangent of the last step."""
        minimized = base_optimizers.to_minimize
        return {
            one.spec.key: base_optimizers.at_least_float32(minimized(self.group, one.grad)) for one in params
        }


def begin(
    base: type,
    number: int,
    group: dict[str, Any],
    specs: Mapping[Tensor, ParamSpec],
    states: Mapping[Tensor, dict[str, Any]],
) -> GroupStep | None:
    """Return the step of the group of this number, or None if no parameter has a gradient.

    Settings are entries of a dict that anyone may change, and are checked at every step.
    """
    config.check_group(base, group)
    if not specs.keys() >= set(group["params"]):
        raise RuntimeError(
            f"Group {number} holds a parameter that FOP was not given, and has no preconditioner for. "
            "Add parameters by add_param_group."
        )
    params = [
        ParamStep(p, p.grad, specs[p], states.get(p, {})) for p in group["params"] if p.grad is not None
    ]
    if not params:
        return None
    pure = base_optimizers.described(base, group)
    rule = step_rule(
        pure,
        tuple(group["learn"]),
        group["credit"],
        bool(group["scale_free"]),
        single=all(one.param.dtype is torch.float32 for one in params),
        fused=isinstance(pure, Momentum) and fused_sgd.is_allowed(group),
    )
    preconditioned = [one for one in params if one.spec.shapes] if rule.learns_precond else []
    like_param = state.BEFORE if rule.learned_settings else _KEPT_FOR_CREDIT[rule.credit][0]
    for one in params if rule.learned_settings else preconditioned:
        _check(one, one.entries.saved.get(like_param))
    return GroupStep(group, rule, params, preconditioned, Entries(group))


def _check(one: ParamStep, last: Tensor | None) -> None:
    """Raise RuntimeError for a sparse gradient, or for another shape than what the `last` step has left."""
    if one.grad.layout is not torch.strided:
        raise RuntimeError(
            f"FOP takes dense gradients, got a {one.grad.layout} one for {one.spec.name!r}. "
            "Make the layer's gradients dense, for example by nn.Embedding(sparse=False)."
        )
    if last is not None and last.shape != one.param.shape:
        raise RuntimeError(
            f"The parameter {one.spec.name!r} had the shape {tuple(last.shape)} in its last step, and has "
            f"{tuple(one.param.shape)} now. Make a new FOP after changing the shape of a parameter."
        )
