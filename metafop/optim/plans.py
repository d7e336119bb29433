"""What FOP holds for a parameter: which entries of its state, of which shapes, under which names."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from metafop import tree
from metafop.preconditioners import Identity, clocks
from metafop.types import Preconditioner, Tree

PREFIX = "fop_"  # of every entry that is not the base's own
# What can be set for each group, besides the base's settings.
SETTINGS = ("preconditioner", "meta_lr", "order", "credit", "scale_free", "interval", "learn", "fop_steps")


class Plan(NamedTuple):
    """A parameter's name and family, and its m: structure, shapes, and which leaves of it are learned."""

    name: str
    family: Preconditioner
    structure: Tree  # of the numbers of its leaves
    shapes: tuple[torch.Size, ...]
    learned: tuple[bool, ...]
    seed: int


def plan(param: Tensor, family: Preconditioner, name: str, seed: int) -> Plan:
    """Return the plan of a parameter, or refuse one that the family cannot take."""
    if param.is_complex():
        raise TypeError(
            f"FOP takes real parameters, got {name!r} of {param.dtype}. Train torch.view_as_real of it."
        )
    if not param.numel():
        family = Identity()
    try:
        m = start(param, family, seed)
    except ValueError as error:
        raise ValueError(f"The parameter {name!r} does not suit its preconditioner: {error}") from None
    leaves, form = tree.flatten(m)
    structure = tree.unflatten(list(range(len(leaves))), form)
    passing = clocks(m, "m")
    learned = tuple(leaf not in passing for leaf in tree.named(m, "m"))
    return Plan(name, family, structure, tuple(x.shape for x in leaves), learned, seed)


def start(param: Tensor, family: Preconditioner, seed: int) -> Tree:
    """Return the family's m before anything is learned: the same, whenever and wherever it is asked for."""
    return family.init(param.detach(), Generator().manual_seed(seed))


def m_of(plan: Plan, state: Mapping[str, Any]) -> Tree:
    return tree.map(lambda i: state[f"{PREFIX}m{i}"], plan.structure)


def check_groups(
    saved: list[dict[str, Any]], groups: list[dict[str, Any]], defaults: Mapping[str, Any]
) -> None:
    """Refuse the groups of another optimizer: of other sizes, or without settings that the base needs."""
    sizes, here = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != here:
        raise ValueError(
            f"The loaded state dict has groups of {sizes} parameters, and this optimizer groups of {here}: "
            "it doesn't match. Make the same groups before loading."
        )
    # A flag may be younger than what was saved; the base fills it in.
    needed = [name for name, value in defaults.items() if value is not None and not isinstance(value, bool)]
    for i, group in enumerate(saved):
        missing = [name for name in needed if name not in group]
        if missing:
            raise ValueError(
                f"Group {i} of the state to load has no {', '.join(missing)}: it was saved by another kind "
                "of optimizer. Load the state of one around the same class."
            )


def parted(
    loaded: Mapping[str, Any],
    groups: list[dict[str, Any]],
    plans: Mapping[Tensor, Plan],
    states: Callable[[Tensor], list[Tensor]],
) -> tuple[dict[str, Any], dict[Tensor, dict[str, Any]]]:
    """Return a state to load without FOP's own entries, and these by parameter; refuse what does not fit.

    torch rounds all that it loads to the parameter's precision; M and its kin keep theirs. `states` gives
    what the meta-optimizer holds for a tensor.
    """
    saved = loaded["param_groups"]
    filled = []
    for i, (old, group) in enumerate(zip(saved, groups, strict=True)):
        kept = {k: v for k, v in group.items() if k in SETTINGS and k not in old}
        filled.append(dict(old) | kept)
        if filled[-1]["preconditioner"] != group["preconditioner"]:
            raise ValueError(
                f"Group {i} was saved with preconditioner={filled[-1]['preconditioner']!r}, and here it has "
                f"{group['preconditioner']!r}. Make the optimizer with the one that was saved."
            )
    ids = [i for g in saved for i in g["params"]]
    params = dict(zip(ids, (p for g in groups for p in g["params"]), strict=True))
    rest, own = {}, {}
    for i, state in loaded["state"].items():
        if i in params and isinstance(state, Mapping):
            _check_loaded(plans[params[i]], params[i], state, states)
            rest[i] = {k: v for k, v in state.items() if not k.startswith(PREFIX)}
            own[params[i]] = {k: _placed(v, params[i]) for k, v in state.items() if k.startswith(PREFIX)}
        else:
            rest[i] = state
    return {**loaded, "state": rest, "param_groups": filled}, own


def _placed(value: Any, param: Tensor) -> Any:
    """Return a copy on the parameter's device."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.device == param.device else value.to(param.device)


def _check_loaded(
    plan: Plan, param: Tensor, state: Mapping[str, Any], states: Callable[[Tensor], list[Tensor]]
) -> None:
    """Refuse the state of another parameter, or of another meta-optimizer."""
    ours = {f"{PREFIX}m{i}": shape for i, shape in enumerate(plan.shapes)}
    for i, shape in enumerate(plan.shapes):
        held = states(torch.empty(shape, device="meta"))
        ours |= {f"{PREFIX}meta{i}_{j}": x.shape for j, x in enumerate(held)}
    like = ["momentum_buffer", "exp_avg", "exp_avg_sq"]
    like += [PREFIX + name for name in ("memory", "credit", "before", "direction")]
    missing = [name for name in ours if name not in state] if f"{PREFIX}taken" in state else []
    for name, shape in (ours | dict.fromkeys(like, param.shape)).items():
        found = state.get(name)
        if isinstance(found, Tensor) and found.shape != shape:
            missing.append(f"{name} (of shape {tuple(shape)}, not {tuple(found.shape)})")
    if missing:
        raise ValueError(
            f"The state to load has no {', '.join(missing)} for the parameter {plan.name!r}. Load the state "
            "of an optimizer for the same model, with the same preconditioners and meta-optimizer."
        )
