"""Every entry that FOP keeps in the optimizer's state and groups: its key, its form, and when it exists.

The keys are the format of saved states. Of each parameter that has a P, from its first step on:

    fop_m{i}            family's, float32 or more     leaf i of m
    fop_meta{i}_{j}     meta-optimizer's              its j-th state for leaf i
    fop_updates         int                           how often m was moved
    fop_next            int                           the step of the group from which m may be moved again
    fop_taken           0 or 1                        whether the next step may learn from the last one
    fop_lr              float, or scalar tensor       lr of the last step that was recorded
    fop_rolled          0 or 1                        whether its displacement is the velocity's, at lr = 1
    fop_moved           scalar                        otherwise its displacement ‖Δθ‖
    fop_credit          like θ                        what P is credited with in it; not for a heavy ball
    fop_memory          like θ                        u, the sum or average of gradients; for velocity credit
    fop_direction       like θ                        P g in it; for Adam's credit="gradient"
    fop_held_{name}     the base's                    its moments before it; for Adam's credit="gradient"

Of each parameter of a group with a learned lr or momentum, from its first step on:

    fop_steered         0 or 1                        whether the next step may learn from the last one
    fop_before          like θ                        θ before it
    fop_direction       like θ                        P g in it, or g
    fop_held_{name}     the base's                    its moments before it

"Like θ" is of its shape, and in float32 where θ has half precision; fop_before has the precision of θ. The
entries in `TRANSIENT` are dropped when a changed setting leaves them without use. Of each group:

    the settings in `SETTINGS`
    fop_steps                   int                       how many steps it has taken
    fop_{lr,momentum}_offset    scalar                    what is learned, in its coordinate (docs/math.md, 9)
    fop_{lr,momentum}_{j}       meta-optimizer's          its j-th state for the offset
    fop_{lr,momentum}_updates   int                       how often it was moved
    fop_{lr,momentum}_used      float, or scalar tensor   its value in the last step
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from metafop import tree
from metafop.preconditioners import Identity, clocks
from metafop.protocols import Preconditioner
from metafop.types import Tree

PREFIX = "fop_"  # of every entry of a parameter that is not the base's own

UPDATES, NEXT = "fop_updates", "fop_next"
USABLE = "fop_taken"
LR, FROM_VELOCITY, DISPLACEMENT = "fop_lr", "fop_rolled", "fop_moved"
CREDIT, MEMORY, DIRECTION = "fop_credit", "fop_memory", "fop_direction"
USABLE_FOR_SETTINGS, BEFORE = "fop_steered", "fop_before"
MOMENTS = {name: f"fop_held_{name}" for name in ("velocity", "time", "mean", "square")}
# What the last step leaves for the next to learn from, and what has no use after settings have changed.
TRANSIENT = (CREDIT, MEMORY, DIRECTION, USABLE_FOR_SETTINGS, BEFORE, *MOMENTS.values())
_LIKE_PARAM = (CREDIT, MEMORY, DIRECTION, BEFORE)

STEPS = "fop_steps"
# What can be set for each group besides the base's settings, and the count of its steps.
SETTINGS = ("preconditioner", "meta_lr", "order", "credit", "scale_free", "interval", "learn", STEPS)


def meta_keys(leaf: int, states: int) -> list[str]:
    """Return the keys of the meta-optimizer's states for a leaf of m, given how many it has."""
    return [f"fop_meta{leaf}_{j}" for j in range(states)]


class SettingKeys(NamedTuple):
    """Keys of a group's entries for a setting that is learned."""

    offset: str
    updates: str
    used: str
    states: tuple[str, ...]


def setting_keys(name: str, states: int = 0) -> SettingKeys:
    """Return the keys for "lr" or "momentum", given how many states the meta-optimizer has for a tensor."""
    key = f"fop_{name}"
    return SettingKeys(
        f"{key}_offset", f"{key}_updates", f"{key}_used", tuple(f"{key}_{j}" for j in range(states))
    )


class ParamSpec(NamedTuple):
    """A parameter's name and family, and its m: structure, shapes, and which leaves of it are learned."""

    key: str  # its number, which is unlike every other's
    name: str
    family: Preconditioner
    structure: Tree  # of the keys of its leaves
    m_keys: tuple[str, ...]  # of its leaves in the state
    shapes: tuple[torch.Size, ...]
    learned: tuple[bool, ...]  # the others count steps
    seed: int

    def start(self, param: Tensor) -> Tree:
        """Return m before anything is learned: the same, whenever and wherever it is asked for."""
        return _start(param, self.family, self.seed)

    def m(self, entries: "Mapping[str, Any] | Entries") -> Tree:
        if isinstance(self.structure, str):  # one tensor, as most families have: `tree.map` takes 10 µs
            return entries[self.structure]
        return tree.map(entries.__getitem__, self.structure)


class Entries:
    """FOP's entries of a parameter or a group, as they will be once the base has stepped.

    What is set here is written into the optimizer only then: a step that fails leaves everything as it was.
    """

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self.saved = saved
        self.new: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        """Return an entry, or None."""
        return self.new[key] if key in self.new else self.saved.get(key)

    def __getitem__(self, key: str) -> Any:
        return self.new[key] if key in self.new else self.saved[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.new[key] = value


def spec(param: Tensor, family: Preconditioner, name: str, number: int, seed: int) -> ParamSpec:
    """Return the spec of a parameter. Raises an error if it is complex, or if the family does not fit it."""
    if param.is_complex():
        raise TypeError(
            f"FOP takes real parameters, got {name!r} of {param.dtype}. Train torch.view_as_real of it."
        )
    if not param.numel():
        family = Identity()
    try:
        m = _start(param, family, seed)
    except ValueError as error:
        raise ValueError(f"The parameter {name!r} does not suit its preconditioner: {error}") from None
    leaves, form = tree.flatten(m)
    keys = tuple(f"fop_m{i}" for i in range(len(leaves)))
    counting = clocks(m, "m")
    learned = tuple(leaf not in counting for leaf in tree.named(m, "m"))
    return ParamSpec(
        key=str(number),
        name=name,
        family=family,
        structure=tree.unflatten(list(keys), form),
        m_keys=keys,
        shapes=tuple(x.shape for x in leaves),
        learned=learned,
        seed=seed,
    )


def _start(param: Tensor, family: Preconditioner, seed: int) -> Tree:
    return family.init(param.detach(), Generator().manual_seed(seed))


def check_groups(
    saved: list[dict[str, Any]], groups: list[dict[str, Any]], defaults: Mapping[str, Any]
) -> None:
    """Raise ValueError for groups of another optimizer: of other sizes, or without settings of the base."""
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


def split(
    loaded: Mapping[str, Any],
    groups: list[dict[str, Any]],
    specs: Mapping[Tensor, ParamSpec],
    like_param: tuple[str, ...],
    init_meta: Callable[[Tensor], list[Tensor]],
) -> tuple[dict[str, Any], dict[Tensor, dict[str, Any]]]:
    """Return a state for the base, without FOP's own entries, and these by parameter.

    Raises ValueError if it does not fit. torch rounds all that it loads to the parameter's precision; M and
    what comes with it keep theirs. `like_param` are the base's entries that have the parameter's shape;
    `init_meta` returns the meta-optimizer's first state for a tensor.
    """
    saved = loaded["param_groups"]
    filled = [_filled(i, old, group) for i, (old, group) in enumerate(zip(saved, groups, strict=True))]
    ids = [i for g in saved for i in g["params"]]
    params = dict(zip(ids, (p for g in groups for p in g["params"]), strict=True))
    rest, own = {}, {}
    for i, state in loaded["state"].items():
        if i in params and isinstance(state, Mapping):
            _check_param(specs[params[i]], params[i], state, (*_LIKE_PARAM, *like_param), init_meta)
            rest[i] = {k: v for k, v in state.items() if not k.startswith(PREFIX)}
            own[params[i]] = {k: _copy(v, params[i]) for k, v in state.items() if k.startswith(PREFIX)}
        else:
            rest[i] = state
    return {**loaded, "state": rest, "param_groups": filled}, own


def _filled(i: int, saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group with FOP's settings as here, where it has none: it may be of the base alone."""
    filled = {k: v for k, v in group.items() if k in SETTINGS} | dict(saved)
    if filled["preconditioner"] != group["preconditioner"]:
        raise ValueError(
            f"Group {i} was saved with preconditioner={filled['preconditioner']!r}, and here it has "
            f"{group['preconditioner']!r}. Make the optimizer with the one that was saved."
        )
    if not group["params"]:
        return filled
    return {k: _copy(v, group["params"][0]) if k.startswith(PREFIX) else v for k, v in filled.items()}


def _copy(value: Any, param: Tensor) -> Any:
    """Return a copy on the parameter's device."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.device == param.device else value.to(param.device)


def _check_param(
    spec: ParamSpec,
    param: Tensor,
    state: Mapping[str, Any],
    like_param: tuple[str, ...],
    init_meta: Callable[[Tensor], list[Tensor]],
) -> None:
    """Raise ValueError for the state of another parameter, or of another meta-optimizer."""
    ours = dict(zip(spec.m_keys, spec.shapes, strict=True))
    for i, shape in enumerate(spec.shapes):
        states = init_meta(torch.empty(shape, device="meta"))
        ours |= {key: x.shape for key, x in zip(meta_keys(i, len(states)), states, strict=True)}
    missing = [key for key in ours if key not in state] if USABLE in state else []
    for key, shape in (ours | dict.fromkeys(like_param, param.shape)).items():
        found = state.get(key)
        if isinstance(found, Tensor) and found.shape != shape:
            missing.append(f"{key} (of shape {tuple(shape)}, not {tuple(found.shape)})")
    if missing:
        raise ValueError(
            f"The state to load has no {', '.join(missing)} for the parameter {spec.name!r}. Load the state "
            "of an optimizer for the same model, with the same preconditioners and meta-optimizer."
        )
