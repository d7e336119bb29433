"""The adjoint: a sweep ahead that keeps carries only, and a sweep back, one step at a time."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from metafop import tree
from metafop.hypergradients.compiling import Same, compiled
from metafop.hypergradients.schedule import Schedule
from metafop.hypergradients.unroll import (
    Cotangent,
    Over,
    StepBack,
    batch_at,
    findings,
    forward_fails,
    horizon,
    looks_at_value,
    outer_pull,
)
from metafop.types import Batch, Estimate, Meta, OuterLoss, Seen, Trains

Keep = Literal["all", "sqrt", "log"]


@dataclass(frozen=True)
class Adjoint:
    """The exact hypergradient through T steps, from carries alone: no graph outlives its step.

    λ_T = ∂value/∂carry_T,    (∂value/∂meta, λ_t) += pullback of step t of λ_(t+1)    (docs/math.md, 19)

    `keep` says which carries wait for the sweep back: "all" of them; about √(2T) ("sqrt"), every step taken
    at most twice; or log₂ T ("log"), at most about log₂ T times. Instead, `memory` gives a budget in bytes,
    of which as many are kept as fit; with both, the rule is refused if it needs more. `compile` runs every
    step, ahead and back, through torch.compile: once for a training, however many steps and estimates
    follow. `over="forward"` differentiates the gradient forward: less memory within a step and, where torch
    cannot, the note says so and it is done in reverse.

    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> meta, carry = training.meta(params, SGD().hyper(lr=0.25)), training.init(params)
    >>> estimate = Adjoint()(training, lambda carry: carry.params["w"].sum(), meta, carry, 2 * [torch.ones(1)])
    >>> estimate.value, estimate.grads.hyper.lr  # w = 1 - (1 - 2 lr)²
    (tensor(0.7500), tensor(2.))
    """

    keep: Keep | None = None
    memory: int | None = None
    compile: bool = False
    over: Over = "reverse"

    def __post_init__(self) -> None:
        for name, value, options in (
            ("keep", self.keep, (None, *get_args(Keep))),
            ("over", self.over, get_args(Over)),
        ):
            if value not in options:
                raise ValueError(f"Adjoint takes {name} as one of {options}, got {value!r}. Pass one of them.")
        if self.memory is not None and (not isinstance(self.memory, int) or self.memory < 1):
            raise ValueError(f"Adjoint takes memory in bytes, got {self.memory!r}. Pass a positive integer.")

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Sequence[Batch]
    ) -> Estimate:
        steps = horizon(training, meta, carry, batches)
        over, notes = self.over, ()
        if over == "forward" and (reason := forward_fails(training, carry, batch_at(batches, 0))):
            over, notes = "reverse", (reason,)
        values = looks_at_value(training, meta, carry)
        walk = _walk(Same(training), over, values, self.compile)
        # Only a compiled step back can leave out a gradient that was kept.
        kept = tree.size(carry.params) if self.compile else 0
        schedule = Schedule(tree.size(carry), tree.size(carry) + kept)
        sweep = _Sweep(walk, outer_loss, meta, batches, schedule, keeps_seen=self.compile)
        end = sweep.back(0, steps, carry, self._budget(schedule, steps), None)
        info = findings(outer_loss, carry, end.carry, end.value, sweep.values, sweep.sizes[::-1])
        return Estimate(end.value, end.grads, end.carry, info | {"notes": notes + info["notes"]})

    def _budget(self, schedule: Schedule, steps: int) -> int:
        """Return the bytes of carries to keep, or refuse a horizon that does not fit into the memory given."""
        most = schedule.whole * steps
        least = schedule.carry * steps.bit_length()
        rules = {"all": most, "sqrt": schedule.least(steps, passes=2), "log": least}
        if self.memory is None:
            return min(rules[self.keep or "all"], most)
        needed = rules[self.keep] if self.keep else least
        if min(needed, most) > self.memory:
            raise ValueError(
                f"A horizon of {steps} steps with carries of {schedule.carry:,} bytes needs "
                f"{min(needed, most):,} bytes {f'to keep {self.keep!r}' if self.keep else 'at the least'}, "
                f"and memory={self.memory:,}. Give more memory, keep fewer, or take a shorter horizon."
            )
        return min(rules[self.keep] if self.keep else self.memory, most)


adjoint = Adjoint()


class _Walk(NamedTuple):
    """One step ahead and one back, as plain functions of trees."""

    ahead: Callable[[Meta, Any, Batch], tuple[Any, Seen]]
    back: Callable[..., tuple[Meta, Cotangent, Tensor]]


class _End(NamedTuple):
    """How an unroll ended, and the derivatives so far: in meta, and in the carry that was reached going back."""

    value: Tensor
    carry: Any
    grads: Meta
    cotangent: Cotangent


@lru_cache(maxsize=32)
def _walk(training: Same[Trains], over: Over, values: bool, compile: bool) -> _Walk:
    """Return the two functions; the same ones for the same training, so that each is compiled once."""
    inner = training.value
    step_back = StepBack(inner, over, values)

    def ahead(meta: Meta, carry: Any, batch: Batch) -> tuple[Any, Seen]:
        seen = inner.evaluate(carry, batch)
        return inner.advance(meta, carry, seen)[0], seen

    def back(
        meta: Meta, carry: Any, batch: Batch, grads: Meta, cotangent: Cotangent, seen: Seen | None
    ) -> tuple[Meta, Cotangent, Tensor]:
        d_meta, cotangent = step_back(meta, carry, batch, cotangent, seen)
        return tree.add(grads, d_meta), cotangent, tree.norm(cotangent)

    return _Walk(compiled(ahead), compiled(back)) if compile else _Walk(ahead, back)


class _Sweep:
    """Sweeps back over an unroll within a budget, going ahead again from carries that were kept."""

    def __init__(
        self,
        walk: _Walk,
        outer_loss: OuterLoss,
        meta: Meta,
        batches: Sequence[Batch],
        schedule: Schedule,
        keeps_seen: bool,
    ) -> None:
        self.walk, self.outer_loss, self.meta, self.batches = walk, outer_loss, meta, batches
        self.schedule, self.keeps_seen = schedule, keeps_seen
        self.values: list[Tensor] = []  # the loss that each step saw, from the first
        self.sizes: list[Tensor] = []  # ‖λ_t‖, from the last

    def back(self, start: int, stop: int, carry: Any, budget: int, end: _End | None) -> _End:
        """Return the derivatives at `start`, whose carry is given, from those at `stop` (None: the last)."""
        while distance := self.schedule.ahead(stop - start, budget):
            middle = start + distance
            kept = self._ahead(carry, start, middle)
            end = self.back(middle, stop, kept, budget - self.schedule.carry, end)
            del kept
            stop = middle
        return self._back_kept(start, stop, carry, end)

    def _ahead(self, carry: Any, start: int, stop: int) -> Any:
        for t in range(start, stop):
            carry, seen = self.walk.ahead(self.meta, carry, batch_at(self.batches, t))
            self._record(t, seen)
        return carry

    def _back_kept(self, start: int, stop: int, carry: Any, end: _End | None) -> _End:
        """Go ahead keeping everything, then back."""
        kept: list[tuple[Any, Seen | None]] = []
        for t in range(start, stop):
            if end is not None and t == stop - 1 and not self.keeps_seen:
                kept.append((carry, None))  # where the last step leads is known
                break
            after, seen = self.walk.ahead(self.meta, carry, batch_at(self.batches, t))
            self._record(t, seen)
            kept.append((carry, seen if self.keeps_seen else None))
            carry = after
        if end is None:
            value, cotangent = outer_pull(self.outer_loss, carry)
            self.sizes.append(tree.norm(cotangent))
            end = _End(value, carry, tree.zeros_like(self.meta), cotangent)
        value, last, grads, cotangent = end
        del end, carry
        for t in reversed(range(start, stop)):
            before, seen = kept.pop()
            batch = batch_at(self.batches, t)
            grads, cotangent, size = self.walk.back(self.meta, before, batch, grads, cotangent, seen)
            self.sizes.append(size)
        return _End(value, last, grads, cotangent)

    def _record(self, t: int, seen: Seen) -> None:
        if t == len(self.values):
            self.values.append(seen.value)
