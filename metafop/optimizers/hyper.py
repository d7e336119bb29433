"""What a hyperparameter is: a number, a schedule, or a tuple of these; one for all, or one a pattern."""

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, reduce
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from metafop import patterns, tree
from metafop.optimizers.domains import Timed
from metafop.protocols import CompleteOptimizer, Domain, Domains, Optimizer

# A number, a schedule of numbers, or a dict of these by pattern of parameter names.
Value = float | Tensor | Sequence[float] | Mapping[str, float | Tensor | Sequence[float]]
Shared = TypeVar("Shared")


def named_tuple(names: Iterable[str], values: Iterable[Any]) -> Any:
    """Return a NamedTuple of `values` with these `names`. The same names are one class, in every process."""
    return _class(tuple(names))(*values)


@cache
def _class(names: tuple[str, ...]) -> Any:
    made: Any = namedtuple("Hyper", names)
    made.__reduce__ = lambda self: (named_tuple, (self._fields, tuple(self)))
    return made


def made(optimizer: CompleteOptimizer, values: Mapping[str, Any]) -> Any:
    """Return the hyperparameters of an optimizer, or refuse names that it does not have, or needs."""
    known, given = list(optimizer.domains), ", ".join(values)
    if others := [name for name in values if name not in known]:
        elsewhere = {_ELSEWHERE[name] for name in others if name in _ELSEWHERE}
        hint = f" {' or '.join(sorted(elsewhere))} has what you ask for." if elsewhere else ""
        raise TypeError(
            f"{optimizer} has the hyperparameters {', '.join(known)}, got {', '.join(others)}. "
            f"Pass some of the former by name.{hint}"
        )
    arguments = inspect.signature(optimizer.hyper).parameters.values()
    needed = [each.name for each in arguments if each.default is each.empty and each.kind != each.VAR_KEYWORD]
    if missing := [name for name in needed if name not in values]:
        raise TypeError(
            f"{optimizer} needs a value for {', '.join(missing)}, got {given or 'none'}. "
            f"Pass {', '.join(f'{name}=...' for name in missing)}."
        )
    return optimizer.hyper(**values)


_ELSEWHERE = {
    "momentum": "Momentum()",
    "betas": "Adam()",
    "eps": "Adam()",
    "nesterov": "Momentum(nesterov=True)",
}


def tensors(owner: object, domains: Domains, values: Mapping[str, Any]) -> list[Any]:
    """Return the values as float64 scalars or schedules, in tuples, in dicts by pattern, each checked."""
    return [_parsed(owner, name, value, domains[name]) for name, value in values.items()]


def _parsed(owner: object, name: str, value: Any, domain: Domain | tuple[Domain, ...]) -> Any:
    if isinstance(domain, tuple):
        return tuple(
            _parsed(owner, f"{name}[{i}]", each, part)
            for i, (each, part) in enumerate(
                zip(_parts(owner, name, value, len(domain)), domain, strict=True)
            )
        )
    if isinstance(value, Mapping):
        return {key: _tensor(owner, f"{name}[{key!r}]", each, domain) for key, each in value.items()}
    return _tensor(owner, name, value, domain)


def _parts(owner: object, name: str, value: Any, count: int) -> list[Any]:
    """Return the parts of a tuple such as betas, given as one, or as one for each pattern."""
    if isinstance(value, Mapping):
        by_pattern = {key: _parts(owner, f"{name}[{key!r}]", each, count) for key, each in value.items()}
        return [{key: parts[i] for key, parts in by_pattern.items()} for i in range(count)]
    if not isinstance(value, tuple | list) or len(value) != count:
        raise TypeError(
            f"{owner} takes {count} values for {name}, got {value!r}. Pass a tuple of {count}, each "
            "a number, a tensor, or a dict of these by parameter name."
        )
    return list(value)


def _tensor(owner: object, name: str, value: Any, domain: Domain) -> Tensor:
    made = (
        _schedule(owner, name, value, domain.steps)
        if isinstance(domain, Timed)
        else _scalar(owner, name, value)
    )
    if not made.is_floating_point():
        raise TypeError(f"{owner} takes a floating-point {name}, got {made.dtype}. Pass a float.")
    for place, number in extremes(name, made):
        if not domain.holds(number):
            raise ValueError(
                f"{owner} takes {place} {domain.says}, got {number:g}. Pass a value in that range."
            )
    return made


def _scalar(owner: object, name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) and not _is_number(value):
        raise TypeError(
            f"{owner} takes a number for {name}, got {value!r}. Pass a float, a scalar tensor, or a dict of "
            "these by parameter name; for a schedule, wrap the optimizer in Scheduled."
        )
    if isinstance(value, Tensor) and value.dim() != 0:
        raise ValueError(
            f"{owner} takes a scalar {name}, got a tensor of shape {tuple(value.shape)}. "
            "For a value per parameter pass a dict by name; for a sweep, vmap over the field; "
            "for a schedule, wrap the optimizer in Scheduled."
        )
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _schedule(owner: object, name: str, value: Any, steps: int) -> Tensor:
    """Return a schedule of so many entries: a value repeated, or one that is given."""
    given = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    if not isinstance(value, Tensor) and not all(map(_is_number, given)):
        raise TypeError(
            f"{owner} takes numbers for {name}, got {value!r}. Pass a number, a list of them, or a tensor."
        )
    schedule = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if schedule.dim() == 0:
        return schedule.repeat(steps)
    if schedule.dim() > 1 or len(schedule) != steps:
        raise ValueError(
            f"{owner} takes {steps} entries for {name}, got a tensor of shape {tuple(schedule.shape)}. "
            f"Pass one entry for each step, or Scheduled(..., steps={len(schedule)})."
        )
    return schedule


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def extremes(name: str, value: Tensor) -> list[tuple[str, float]]:
    """Return the least and the greatest number of a tensor, each with its place, such as "lr[3]".

    A domain is an interval: it holds all numbers if it holds these two. Where no value may be looked at,
    there are none.
    """
    if not tree.is_concrete(value) or not value.numel():
        return []
    found = []
    for where in (value.argmin(), value.argmax()):
        index = [int(i) for i in torch.unravel_index(where, value.shape)]
        found.append((f"{name}{index}" if index else name, value.flatten()[where].item()))
    return found


def check_fields(optimizer: Optimizer, hyper: Any) -> None:
    """Refuse what is not made for this optimizer."""
    fields = getattr(hyper, "_fields", ())
    if set(fields) != set(optimizer.domains):
        raise TypeError(
            f"{optimizer} takes the hyperparameters {list(optimizer.domains)}, "
            f"got {type(hyper).__name__} with {list(fields)}. "
            "Let its method hyper return these, or leave that method out."
        )


def fitted(optimizer: CompleteOptimizer, values: Mapping[str, Any], moves: dict[str, Tensor]) -> Any:
    """Return the hyperparameters of an `optimizer` in the precision and on the device of what it moves.

    values: those that are given, by name: numbers, or dicts of these by pattern. Others have its defaults.
    moves: what it moves, by the names that patterns are for.
    """
    hyper = made(optimizer, values)
    check_fields(optimizer, hyper)
    hyper = type(hyper)(*tensors(optimizer, optimizer.domains, hyper._asdict()))
    for field, value in hyper._asdict().items():
        for each in value if isinstance(value, tuple) else (value,):
            _check_patterns(optimizer, field, each, moves)
    device = next(iter(moves.values())).device
    dtype = reduce(torch.promote_types, [x.dtype for x in moves.values()], torch.float32)
    return tree.map(lambda x: x.to(device=device, dtype=dtype), hyper)


def _check_patterns(optimizer: Optimizer, field: str, value: Any, moves: dict[str, Tensor]) -> None:
    """Refuse a dict that leaves something without a value, or has a value for nothing."""
    if not isinstance(value, dict):
        return
    left = [name for name in moves if patterns.first(tuple(value), name) is None]
    unused = patterns.unused(value, moves)
    if unused and not left:
        raise ValueError(
            f"{optimizer} got a {field} for {list(value)}, of which {unused} come first for none of "
            f"{sorted(moves)}. The first pattern that fits counts: put narrow ones before '*'."
        )
    if left:
        raise ValueError(
            f"{optimizer} got a {field} for {list(value)}, but moves {sorted(moves)}. Give one "
            "value for each of these, by name or by pattern ('encoder.*', '*' for the rest), or one for all."
        )


def alike(new: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `new` in the precision of `old`: torch would widen a half-precision scalar to that of lr."""
    return {name: in_dtype(x, old[name].dtype) for name, x in new.items()}


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # a call takes as long as arithmetic on a small tensor


def at(value: Tensor | dict[str, Tensor], name: str) -> Tensor:
    """Return the `value` for the parameter `name`: its own, or that of the first pattern that fits it."""
    return value[_key(value, name)] if isinstance(value, dict) else value


def _key(value: dict[str, Tensor], name: str) -> Any:
    return name if name in value else patterns.first(tuple(value), name)


def shared(
    function: Callable[..., Shared], names: Iterable[str], *values: Tensor | dict[str, Tensor]
) -> dict[str, Shared]:
    """Return `function(at(value, name), …)` for each name, computed once for all that share the values."""
    if not any(isinstance(value, dict) for value in values):
        return dict.fromkeys(names, function(*values))
    keys = {name: tuple(isinstance(x, dict) and _key(x, name) for x in values) for name in names}
    owners = {key: name for name, key in reversed(keys.items())}
    made = {key: function(*(at(x, owner) for x in values)) for key, owner in owners.items()}
    return {name: made[key] for name, key in keys.items()}


def negative(value: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    return {name: -x for name, x in value.items()} if isinstance(value, dict) else -value


def collect(value: Tensor | dict[str, Tensor], by_name: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Return the derivative in `value`, given that in each `at(value, name)`: the transpose of `at`."""
    if not isinstance(value, dict):
        return torch.stack(list(by_name.values())).sum()
    parts: dict[str, list[Tensor]] = {key: [] for key in value}
    for name, x in by_name.items():
        parts[_key(value, name)].append(x)
    return {key: _sum(each) if each else torch.zeros_like(value[key]) for key, each in parts.items()}


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
