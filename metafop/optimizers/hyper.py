"""What a hyperparameter is: a number or a schedule, one or one per parameter, learned in a coordinate."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.types import Domain, Optimizer

Value = float | Tensor | Mapping[str, float | Tensor]


@dataclass(frozen=True)
class Positive:
    """x ≥ 0 (or x > 0, where `zero` is not allowed), learned as z = log x (docs/math.md, 9)."""

    zero: bool = True

    @property
    def says(self) -> str:
        return "of zero or more" if self.zero else "above zero"

    def holds(self, value: float) -> bool:
        return self.inside(value) or (self.zero and value == 0)

    def inside(self, value: float) -> bool:
        return 0 < value < math.inf

    def coordinate(self, value: Tensor) -> Tensor:
        return value.log()

    def chain(self, value: Tensor, derivative: Tensor) -> Tensor:
        """dx/dz = x."""
        return value * derivative

    def moved(self, value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """x(z + δ) = x exp δ: no change leaves every bit as it was. It does not underflow to zero."""
        return (value * (new - old).exp()).clamp(min=torch.finfo(value.dtype).tiny)


@dataclass(frozen=True)
class Unit:
    """0 ≤ x < 1, learned as z = logit x = log(x / (1 - x)) (docs/math.md, 9)."""

    @property
    def says(self) -> str:
        return "from 0 to below 1"

    def holds(self, value: float) -> bool:
        return 0 <= value < 1

    def inside(self, value: float) -> bool:
        return 0 < value < 1

    def coordinate(self, value: Tensor) -> Tensor:
        return value.logit()

    def chain(self, value: Tensor, derivative: Tensor) -> Tensor:
        """dx/dz = x (1 - x)."""
        return value * (1 - value) * derivative

    def moved(self, value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """x(z + δ) = x + x (1 - x) e / (1 + x e), e = exp δ - 1: no change leaves every bit as it was.

        It does not round to zero or to one.
        """
        limits = torch.finfo(value.dtype)
        e = torch.expm1((new - old).clamp(max=50.0))
        moved = value + value * (1 - value) * e / (1 + value * e)
        return moved.clamp(min=limits.tiny, max=1 - limits.eps)


@dataclass(frozen=True)
class Free:
    """Any x, learned as it is."""

    @property
    def says(self) -> str:
        return "of any size"

    def holds(self, value: float) -> bool:
        return math.isfinite(value)

    def inside(self, value: float) -> bool:
        return math.isfinite(value)

    def coordinate(self, value: Tensor) -> Tensor:
        return value

    def chain(self, value: Tensor, derivative: Tensor) -> Tensor:
        return derivative

    def moved(self, value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        return new


@dataclass(frozen=True)
class Timed:
    """A schedule: x_0 … x_(T-1) along a time axis, each in the same `domain`, learned in its coordinate."""

    domain: Domain

    @property
    def says(self) -> str:
        return self.domain.says

    def holds(self, value: float) -> bool:
        return self.domain.holds(value)

    def inside(self, value: float) -> bool:
        return self.domain.inside(value)

    def coordinate(self, value: Tensor) -> Tensor:
        return self.domain.coordinate(value)

    def chain(self, value: Tensor, derivative: Tensor) -> Tensor:
        return self.domain.chain(value, derivative)

    def moved(self, value: Tensor, old: Tensor, new: Tensor) -> Tensor:
        return self.domain.moved(value, old, new)


def tensors(owner: object, domains: Mapping[str, Domain], values: Mapping[str, Value]) -> list[Tensor | dict]:
    """Return the values as float64 scalars and schedules, or dicts of them by name, each checked."""

    def tensor(name: str, value: float | Tensor) -> Tensor:
        if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
            raise TypeError(
                f"{owner}.hyper takes a number for {name}, got {value!r}. "
                "Pass a float, a scalar tensor, or a dict of these by parameter name."
            )
        made = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        domain = domains[name.split("[")[0]]
        _check_shape(owner, name, made, domain)
        if not made.is_floating_point():
            raise TypeError(f"{owner}.hyper takes a floating-point {name}, got {made.dtype}. Pass a float.")
        for place, number in extremes(name, made):
            if not domain.holds(number):
                raise ValueError(
                    f"{owner}.hyper takes {place} {domain.says}, got {number:g}. Pass a value in that range."
                )
        return made

    made = {
        name: {key: tensor(f"{name}[{key!r}]", v) for key, v in value.items()}
        if isinstance(value, Mapping)
        else tensor(name, value)
        for name, value in values.items()
    }
    _check_lengths(owner, {name: made[name] for name in made if isinstance(domains[name], Timed)})
    return list(made.values())


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


def _check_shape(owner: object, name: str, value: Tensor, domain: Domain) -> None:
    if not isinstance(domain, Timed) and value.dim() != 0:
        raise ValueError(
            f"{owner}.hyper takes a scalar {name}, got a tensor of shape {tuple(value.shape)}. "
            "For a value per parameter pass a dict by name; for a sweep, vmap over the field; "
            "for a schedule, wrap the optimizer in Scheduled."
        )
    if isinstance(domain, Timed) and (value.dim() != 1 or not len(value)):
        raise ValueError(
            f"{owner}.hyper takes a schedule of one or more entries for {name}, got a tensor of shape "
            f"{tuple(value.shape)}. Make it with {owner}.hyper(hyper, steps)."
        )


def _check_lengths(owner: object, schedules: Mapping[str, Tensor | dict[str, Tensor]]) -> None:
    lengths = {name: len(schedule) for name, schedule in tree.named(schedules).items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"{owner} takes schedules of one length, got entries for {lengths} steps. "
            "Repeat the last entry of the shorter ones: it would be held anyway."
        )


def check_fields(optimizer: Optimizer, hyper: Any) -> None:
    """Refuse what is not made for this optimizer."""
    fields = getattr(hyper, "_fields", ())
    if set(fields) != set(optimizer.domains):
        raise TypeError(
            f"{optimizer} takes the hyperparameters {list(optimizer.domains)}, "
            f"got {type(hyper).__name__} with {list(fields)}. Make them with {optimizer}.hyper(...)."
        )


def fitted(optimizer: Optimizer, hyper: Any, moves: dict[str, Tensor]) -> Any:
    """Return `hyper` as precise as what the optimizer moves, and on its device, checked against both."""
    check_fields(optimizer, hyper)
    hyper = type(hyper)(*tensors(optimizer, optimizer.domains, hyper._asdict()))
    for field, value in hyper._asdict().items():
        if isinstance(value, dict) and value.keys() != moves.keys():
            raise ValueError(
                f"{optimizer} got a {field} for {sorted(value)}, but moves {sorted(moves)}. "
                "Give one value for each of these, or one scalar for all."
            )
    device = next(iter(moves.values())).device
    dtype = reduce(torch.promote_types, [x.dtype for x in moves.values()], torch.float32)
    return tree.map(lambda x: x.to(device=device, dtype=dtype), hyper)


def alike(new: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `new` in the precision of `old`: torch would widen a half-precision scalar to that of lr."""
    return {name: x.to(old[name].dtype) for name, x in new.items()}


def at(value: Tensor | dict[str, Tensor], name: str) -> Tensor:
    """Return the value for the parameter `name`."""
    return value[name] if isinstance(value, dict) else value


def negative(value: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    return {name: -x for name, x in value.items()} if isinstance(value, dict) else -value


def collect(value: Tensor | dict[str, Tensor], by_name: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Return the derivative in `value`, given that in each `at(value, name)`: the transpose of `at`."""
    return by_name if isinstance(value, dict) else torch.stack(list(by_name.values())).sum()
