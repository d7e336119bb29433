"""Schedules: hyperparameters with an entry for each step."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.optimizers.completion import completed
from metafop.optimizers.domains import Timed
from metafop.optimizers.hyper import made, tensors
from metafop.protocols import CompleteOptimizer, Domain, Domains, Optimizer, Reversible
from metafop.types import Params, Tree


class ScheduledState(NamedTuple):
    """How many steps were taken, the `time`, and the state of the optimizer within, `inner`."""

    time: Tensor
    inner: Tree


@dataclass(frozen=True)
class Scheduled:
    """An optimizer whose `fields` have an entry for each step (Maclaurin et al., 2015), the last one held.

    hyper_t = hyper[min(t, T - 1)],    θ', opt' = optimizer(hyper_t, θ, opt, d),    t' = t + 1

    Every entry is a hyperparameter and has a derivative; a dict by pattern of names has a schedule for each.
    It can be undone if what it wraps can. (docs/math.md, 25)

    optimizer: any; its other hyperparameters stay numbers.
    steps: T, the number of entries, 1 or more.
    fields: the names of what has a schedule (("lr",)). For each, `hyper` and `init_meta` take a list or a
        tensor of T entries, a number to be repeated, or a dict of these by pattern; for betas, a tuple of two
        of these. "loss.l2" is a leaf of the loss: it takes a number, or a tensor with T entries.

    >>> scheduled, params, ones = Scheduled(SGD(), steps=3), {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    >>> hyper, state = scheduled.hyper(lr=[0.4, 0.2, 0.1]), scheduled.init(params)
    >>> for _ in range(4):
    ...     params, state = scheduled.update(hyper, params, state, ones)
    >>> params["w"], state.time
    (tensor([-0.8000]), tensor(4.))
    """

    optimizer: Optimizer
    steps: int
    fields: tuple[str, ...] = ("lr",)
    _rule: CompleteOptimizer = field(init=False, repr=False, compare=False)  # the optimizer, completed

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rule", completed("Scheduled", self.optimizer))
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(
                f"Scheduled takes one step or more, got steps={self.steps!r}. Pass the number of entries."
            )
        free = [name for name, domain in self._rule.domains.items() if not _is_timed(domain)]
        if not isinstance(self.fields, tuple) or not self.fields or not set(self._hyper_fields) <= set(free):
            raise ValueError(
                f"Scheduled takes a tuple of fields of {self.optimizer} from {free}, got {self.fields!r}. "
                f"Pass for example {tuple(free[:1])}."
            )

    @property
    def domains(self) -> Domains:
        return {
            name: _timed(domain, self.steps) if name in self.fields else domain
            for name, domain in self._rule.domains.items()
        }

    @property
    def leaf_fields(self) -> tuple[str, ...]:
        """The fields that are leaves of the loss, or the starts of some: "loss", "loss.l2"."""
        return tuple(name for name in self.fields if name.partition(".")[0] == "loss")

    @property
    def _hyper_fields(self) -> tuple[str, ...]:
        return tuple(name for name in self.fields if name not in self.leaf_fields)

    def is_scheduled(self, name: str, field: str | None = None) -> bool:
        """Return whether the leaf of the loss of this `name` has a schedule; if asked, by this `field`."""
        full = f"loss.{name}" if name else "loss"
        fields = self.leaf_fields if field is None else (field,)
        return any(full == each or full.startswith(f"{each}.") for each in fields)

    def leaf(self, name: str, value: Tensor) -> Tensor:
        """Return the leaf of this `name` with an entry a step: a number repeated, or `value` as it is."""
        if not self.is_scheduled(name):
            return value
        if value.dim() == 0:
            return value.repeat(self.steps)
        if len(value) != self.steps:
            raise ValueError(
                f"{self} takes {self.steps} entries for the leaf {name!r} of the loss, got a tensor of shape "
                f"{tuple(value.shape)}. Pass one entry for each step, first dimension, or a number."
            )
        return value

    def leaves(self, leaves: Tree, opt: ScheduledState) -> Tree:
        """Return the `leaves` of the loss as they are at the step that starts from `opt`."""
        if not self.leaf_fields:
            return leaves
        return tree.map_named(lambda name, x: _entry(x, opt.time) if self.is_scheduled(name) else x, leaves)

    def hyper(self, **values: Any) -> Any:
        """Return the hyperparameters, given as `values` by name, with T entries in each of the fields."""
        # A number inside every domain stands for the schedules while the others are made.
        inside = {k: (0.5,) * len(d) if isinstance(d, tuple) else 0.5 for k, d in self.domains.items()}
        plain = made(self._rule, {k: inside[k] if k in self.fields else v for k, v in values.items()})
        given = {name: values.get(name, getattr(plain, name)) for name in self._hyper_fields}
        schedules = dict(zip(given, tensors(self, self.domains, given), strict=True))
        return type(plain)(**(plain._asdict() | schedules))

    def init(self, params: Params) -> ScheduledState:
        return ScheduledState(_start(params), self._rule.init(params))

    def update(
        self, hyper: Any, params: Params, opt: ScheduledState, direction: Params
    ) -> tuple[Params, ScheduledState]:
        params, inner = self._rule.update(self._now(hyper, opt.time), params, opt.inner, direction)
        return params, ScheduledState(opt.time + 1, inner)

    def pullback(
        self, hyper: Any, params: Params, opt: ScheduledState, direction: Params, cotangent: Params
    ) -> tuple[Any, Params]:
        """The optimizer's, at this step's entry: every other entry has a derivative of zero."""
        now = self._now(hyper, opt.time)
        d_now, d_direction = self._rule.pullback(now, params, opt.inner, direction, cotangent)
        d_hyper = {
            name: tree.map(lambda x, d: _placed(x, opt.time, d), getattr(hyper, name), getattr(d_now, name))
            for name in self._hyper_fields
        }
        return type(hyper)(**(d_now._asdict() | d_hyper)), d_direction

    def init_memory(self, params: Params) -> ScheduledState:
        return ScheduledState(_start(params), self._rule.init_memory(params))

    def credit(
        self, hyper: Any, memory: ScheduledState, grads: Params
    ) -> tuple[Params | tuple[()], ScheduledState]:
        """The optimizer's, at the step's entry.

        Its time starts with the first gradient that is not zero: `Online` asks once before there was a step.
        """
        credit, inner = self._rule.credit(self._now(hyper, memory.time), memory.inner, grads)
        begun = (memory.time > 0) | (tree.norm(grads) > 0)
        return credit, ScheduledState(memory.time + begun.to(memory.time.dtype), inner)

    def toward(
        self, hyper: Any, params: Params, opt: ScheduledState, direction: Params, cotangent: Params
    ) -> Params:
        return self._rule.toward(self._now(hyper, opt.time), params, opt.inner, direction, cotangent)

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
        fields = self._hyper_fields
        entries = {name: tree.map(lambda x: _entry(x, time), getattr(hyper, name)) for name in fields}
        return type(hyper)(**(hyper._asdict() | entries))


def _timed(domain: Domain | tuple[Domain, ...], steps: int) -> Domain | tuple[Domain, ...]:
    if isinstance(domain, tuple):
        return tuple(Timed(each, steps) for each in domain)
    return Timed(domain, steps)


def _is_timed(domain: Domain | tuple[Domain, ...]) -> bool:
    return isinstance(domain[0] if isinstance(domain, tuple) else domain, Timed)


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
