"""FOP's settings: the presets, the family of each parameter, and the validation of what a user asks for."""

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from metafop.online import Credit, Order
from metafop.optim import base_optimizers
from metafop.optimizers import Momentum
from metafop.preconditioners import Diagonal, Identity, Normalized, Scalar, by_rule, by_shape
from metafop.protocols import Inspectable, Preconditioner
from metafop.protocols import Optimizer as Pure

VARIANTS = ("fop", "fop-norm", "s-hd", "pp-hd")  # the rows of the paper's table
LEARNED = ("precond", "lr", "momentum")
_FOR_ALL = ("optimizer_class", "preset", "meta_optimizer", "seed", "generator")  # no group's own
_OPTIONS = {"order": get_args(Order), "credit": get_args(Credit)}


class Preset(NamedTuple):
    """Settings that the user need not give."""

    meta_lr: float
    order: Order
    credit: Credit
    scale_free: bool
    interval: int


_PRESETS = {
    # Moving M takes more time than using it: as in SOAP and Shampoo, it is moved at every tenth step.
    "default": Preset(5e-3, "exact", "velocity", scale_free=True, interval=10),
    # Algorithm 1, with the meta learning rate of the paper's table.
    "paper": Preset(1e-4, "paper", "gradient", scale_free=False, interval=1),
}


def preset(name: str) -> Preset:
    """Return the settings of a preset."""
    if name not in _PRESETS:
        raise ValueError(f"FOP has the presets {tuple(_PRESETS)}, got {name!r}. Pass one of them.")
    return _PRESETS[name]


def families(
    preconditioner: Any,
    params: list[Tensor],
    names: list[str] | None,
    layers: Mapping[Tensor, Preconditioner],
) -> list[Preconditioner]:
    """Return the family of each parameter; `layers` has those that suit the layers of a module."""
    usual = [layers.get(p) or by_shape(p) for p in params]
    if isinstance(preconditioner, Mapping):
        return _by_name(preconditioner, names, usual)
    if preconditioner == "fop":
        return usual
    if preconditioner == "fop-norm":
        return [_normalized(family) for family in usual]
    if preconditioner in ("s-hd", "pp-hd"):
        return [Scalar() if preconditioner == "s-hd" else Diagonal()] * len(params)
    _check_family(preconditioner)
    return [preconditioner] * len(params)


def description(preconditioner: Any) -> str:
    """Return a preconditioner as a string, for state dicts: the same in every process."""
    if isinstance(preconditioner, Mapping):
        return str({pattern: description(family) for pattern, family in preconditioner.items()})
    if isinstance(preconditioner, str) or type(preconditioner).__repr__ is not object.__repr__:
        return str(preconditioner)
    return type(preconditioner).__qualname__


def check_class(optimizer_class: Any) -> None:
    """Raise TypeError for what cannot be the base."""
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
        raise TypeError(
            f"FOP takes the class of an optimizer, got {optimizer_class!r}. "
            "Pass one such as torch.optim.SGD, and its settings by name."
        )
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise TypeError(
            "FOP preconditions one gradient a step, got torch.optim.LBFGS, which takes several. "
            "Pass another optimizer."
        )
    for name in ("param_groups", "state"):
        attribute = getattr(optimizer_class, name, None)
        if isinstance(attribute, property) and attribute.fset is None:
            raise TypeError(
                f"FOP sets the {name} of its base, got {optimizer_class.__name__}, in which it is a property "
                "without a setter. Pass the class of the optimizer that it wraps."
            )


def base(optimizer_class: type[Optimizer], params: Any, settings: dict[str, Any]) -> Optimizer:
    """Return the base; of a setting that neither it nor FOP has, say which FOP has."""
    try:
        return optimizer_class(params, **settings)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise TypeError(
            f"{error}. FOP's own settings are preconditioner, preset, meta_lr, meta_optimizer, order, "
            "credit, scale_free, interval, learn and seed. "
            f"Pass one of these, or one of {optimizer_class.__name__}'s."
        ) from error


def check_meta_optimizer(optimizer: Any) -> None:
    """Raise TypeError for what is not a pure optimizer."""
    if optimizer is not None and (isinstance(optimizer, type) or not isinstance(optimizer, Pure)):
        raise TypeError(
            f"FOP takes as meta_optimizer a pure one, such as metafop.Adam(), got {optimizer!r}. "
            "Pass one of metafop's."
        )


def check_keys(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise ValueError for what a group cannot have of its own; `defaults` are the base's settings."""
    for name in _FOR_ALL:
        if name in group and name not in defaults:
            asked = "seed" if name == "generator" else name
            raise ValueError(
                f"FOP takes one {asked} for all groups, got {name}={group[name]!r} in one of them. "
                f"Pass {asked} to FOP itself."
            )


def check_group(optimizer_class: type, group: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of a group that mean nothing."""
    if "lr" not in group:
        raise ValueError(
            f"FOP needs a base with an lr to take derivatives, got {optimizer_class.__name__} without one. "
            "Pass another optimizer."
        )
    for name, options in _OPTIONS.items():
        if group[name] not in options:
            raise ValueError(f"FOP takes {name} as one of {options}, got {group[name]!r}. Pass one of them.")
    if not 0 <= group["meta_lr"] < float("inf"):
        raise ValueError(
            f"FOP takes a meta_lr of zero or more, got {group['meta_lr']}. Pass for example 1e-3."
        )
    interval = group["interval"]
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(f"FOP takes an interval of 1 or more steps, got {interval!r}. Pass a whole number.")
    if group.get("differentiable", False):
        raise ValueError(
            "FOP's step cannot be differentiated, got differentiable=True. "
            "For hypergradients through steps use Training with one of metafop.hypergradients."
        )
    _check_learn(optimizer_class, group)


def _check_learn(optimizer_class: type, group: Mapping[str, Any]) -> None:
    learn = group["learn"]
    if not isinstance(learn, tuple | list) or not learn or not set(learn) <= set(LEARNED):
        raise ValueError(
            f"FOP learns a tuple of some of {LEARNED}, got {learn!r}. Pass for example ('precond',)."
        )
    pure = base_optimizers.described(optimizer_class, group)
    if "lr" in learn and pure is None:
        raise ValueError(
            f"FOP cannot learn the lr of {optimizer_class.__name__} with these settings: it knows SGD "
            "without dampening, Adam and AdamW without amsgrad. Learn 'precond' alone, or use one of these."
        )
    if "momentum" in learn and not isinstance(pure, Momentum):
        raise ValueError(
            f"FOP learns the momentum of torch.optim.SGD without dampening, started above zero, "
            f"got {optimizer_class.__name__}. Pass momentum=0.9, or do not learn it."
        )


def _by_name(
    rules: Mapping[str, Preconditioner], names: list[str] | None, usual: list[Preconditioner]
) -> list[Preconditioner]:
    if names is None:
        raise ValueError(
            f"FOP got preconditioners for {list(rules)}, and parameters without names. "
            "Pass model.named_parameters(), or the model itself."
        )
    for family in rules.values():
        _check_family(family)
    return [by_rule(rules, name, default) for name, default in zip(names, usual, strict=True)]


def _check_family(family: Any) -> None:
    if isinstance(family, type) or not isinstance(family, Preconditioner):
        raise TypeError(
            f"FOP takes as preconditioner one of {VARIANTS}, a family such as LowRank(8), or a dict of "
            f"families by pattern of names, got {family!r}. Pass one of these."
        )


def _normalized(family: Preconditioner) -> Preconditioner:
    if isinstance(family, Identity) or not isinstance(family, Inspectable):
        return family
    return Normalized(family)
