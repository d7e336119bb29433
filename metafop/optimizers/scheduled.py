"""Schedules: hyperparameters with an entry for each step."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.optimizers.hyper import Timed, check_fields, tensors
from metafop.types import Domain, Optimizer, Params, Reversible, Tree

Schedule = float | Tensor | Sequence[float] | Mapping[str, float | Tensor | Sequence[float]]


class ScheduledState(NamedTuple):
    time: Tensor
    inner: Tree


@dataclass(frozen=True)
class Scheduled:
    """An optimizer whose `fields` have an entry for each step (Maclaurin et al., 2015), the last one held.

    hyper_t = hyper[min(t, T - 1)],    θ', opt' = optimizer(hyper_t, θ, opt, d),    t' = t + 1

    Every entry is a hyperparameter and has a derivative; a dict by parameter name has a schedule for each.
    It can be undone if what it wraps can. (docs/math.md, 25)

    >>> scheduled, params, ones = Scheduled(SGD()), {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    >>> hyper = scheduled.hyper(SGD().hyper(lr=0.1), steps=3, schedules={"lr": [0.4, 0.2, 0.1]})
    >>> state = scheduled.init(params)
    >>> for _ in range(4):
    ...     params, state = scheduled.update(hyper, params, state, ones)
    >>> params["w"], state.time
    (tensor([-0.8000]), tensor(4.))
    """

    optimizer: Optimizer
    fields: tuple[str, ...] = ("lr",)

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, type):
            name = self.optimizer.__name__
            raise TypeError(f"Scheduled takes an optimizer, got the class {name}. Pass {name}().")
        free = [name for name, domain in self.optimizer.domains.items() if not isinstance(domain, Timed)]
        if not isinstance(self.fields, tuple) or not self.fields or not set(self.fields) <= set(free):
            raise ValueError(
                f"Scheduled takes a tuple of fields of {self.optimizer} from {free}, got {self.fields!r}. "
                f"Pass for example {tuple(free[:1])}."
            )

    @property
    def domains(self) -> dict[str, Domain]:
        return {
            name: Timed(domain) if name in self.fields else domain
            for name, domain in self.optimizer.domains.items()
        }

    def hyper(self, hyper: Any, steps: int, schedules: Mapping[str, Schedule] | None = None) -> Any:
        """Return `hyper` with `steps` entries in each of the fields: its value repeated, or a schedule given.

        A schedule is a tensor or a sequence of numbers, or a dict of these by parameter name.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(
                f"{self}.hyper takes one step or more, got steps={steps!r}. Pass a positive integer."
            )
        check_fields(self.optimizer, hyper)
        given = schedules or {}
        if not given.keys() <= set(self.fields):
            raise ValueError(
                f"{self} has schedules for {list(self.fields)}, got some for {list(given)}. "
                f"Pass Scheduled(..., fields={tuple(given)}) to have these."
            )
        values = hyper._asdict() | {
            name: _repeated(f"{self}.hyper", name, given.get(name, getattr(hyper, name)), steps)
            for name in self.fields
        }
        return type(hyper)(*tensors(self, self.domains, values))

    def init(self, params: Params) -> ScheduledState:
        return ScheduledState(_start(params), self.optimizer.init(params))

    def update(
        self, hyper: Any, params: Params, opt: ScheduledState, direction: Params
    ) -> tuple[Params, ScheduledState]:
        params, inner = self.optimizer.update(self._now(hyper, opt.time), params, opt.inner, direction)
        return params, ScheduledState(opt.time + 1, inner)

    def pullback(
        self, hyper: Any, params: Params, opt: ScheduledState, direction: Params, cotangent: Params
    ) -> tuple[Any, Params]:
        """The optimizer's, at this step's entry: every other entry has a derivative of zero."""
        now = self._now(hyper, opt.time)
        d_now, d_direction = self.optimizer.pullback(now, params, opt.inner, direction, cotangent)
        d_hyper = {
            name: tree.map(lambda x, d: _placed(x, opt.time, d), getattr(hyper, name), getattr(d_now, name))
            for name in self.fields
        }
        return type(hyper)(**(d_now._asdict() | d_hyper)), d_direction

    def init_memory(self, params: Params) -> ScheduledState:
        return ScheduledState(_start(params), self.optimizer.init_memory(params))

    def credit(
        self, hyper: Any, memory: ScheduledState, grads: Params
    ) -> tuple[Params | tuple[()], ScheduledState]:
        """The optimizer's, at the step's entry.

        Its time starts with the first gradient that is not zero: `Online` asks once before there was a step.
        """
        credit, inner = self.optimizer.credit(self._now(hyper, memory.time), memory.inner, grads)
        begun = (memory.time > 0) | (tree.norm(grads) > 0)
        return credit, ScheduledState(memory.time + begun.to(memory.time.dtype), inner)

    def toward(
        self, hyper: Any, params: Params, opt: ScheduledState, direction: Params, cotangent: Params
    ) -> Params:
        return self.optimizer.toward(self._now(hyper, opt.time), params, opt.inner, direction, cotangent)

    def before(self, hyper: Any, params: Params, opt: ScheduledState) -> tuple[Params, ScheduledState]:
        params, inner = self._reversible.before(self._now(hyper, opt.time - 1), params, opt.inner)
        return params, ScheduledState(opt.time - 1, inner)

    def undo(
        self, hyper: Any, params: Params, opt: ScheduledState, direction: Params, emptied: Params
    ) -> ScheduledState:
        now = self._now(hyper, opt.time)
        return ScheduledState(opt.time, self._reversible.undo(now, params, opt.inner, direction, emptied))

    def emptied(self, hyper: Any, opt: ScheduledState) -> Params:
        return self._reversible.emptied(self._now(hyper, opt.time), opt.inner)

    @property
    def _reversible(self) -> Reversible:
        if not isinstance(self.optimizer, Reversible):
            raise TypeError(
                f"{self} cannot be undone, because {self.optimizer} cannot. "
                "Schedule one that can, such as ReversibleMomentum(), or use adjoint."
            )
        return self.optimizer

    def _now(self, hyper: Any, time: Tensor) -> Any:
        """Return the hyperparameters of the step at `time`."""
        entries = {name: tree.map(lambda x: _entry(x, time), getattr(hyper, name)) for name in self.fields}
        return type(hyper)(**(hyper._asdict() | entries))


def _start(params: Params) -> Tensor:
    first = next(iter(params.values()))
    return first.new_zeros((), dtype=torch.promote_types(first.dtype, torch.float32))


def _entry(schedule: Tensor, time: Tensor) -> Tensor:
    return schedule.index_select(0, _index(schedule, time).reshape(1)).squeeze(0)


def _placed(schedule: Tensor, time: Tensor, derivative: Tensor) -> Tensor:
    """Return the derivative in the schedule, given that in its entry: the transpose of `_entry`."""
    steps = torch.arange(len(schedule), device=schedule.device)
    return torch.where(steps == _index(schedule, time), derivative, 0.0)


def _index(schedule: Tensor, time: Tensor) -> Tensor:
    return time.clamp(max=len(schedule) - 1).long()


def _repeated(owner: str, name: str, value: Any, steps: int) -> Any:
    """Return the value `steps` times, or as it is if it has so many entries; a dict, for each name."""
    if isinstance(value, Mapping):
        return {key: _repeated(owner, f"{name}[{key!r}]", v, steps) for key, v in value.items()}
    given = value if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    if not isinstance(value, Tensor) and not all(map(_is_number, given)):
        raise TypeError(
            f"{owner} takes numbers for {name}, got {value!r}. Pass a number, a list of them, or a tensor."
        )
    schedule = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if schedule.dim() == 0:
        return schedule.repeat(steps)
    if len(schedule) != steps:
        raise ValueError(
            f"{owner} takes {steps} entries for {name}, got {len(schedule)}. "
            f"Pass as many, or steps={len(schedule)}."
        )
    return schedule


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)
