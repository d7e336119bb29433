"""The adjoint: a sweep ahead that keeps carries only, and a sweep back, one step at a time."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable
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
    unfused,
)
from metafop.types import Batch, Batches, Estimate, Meta, OuterLoss, Seen, Trains

Keep = Literal["all", "sqrt", "log"]
Leaves = list[Tensor]


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
    >>> batches, outer_loss = 2 * [torch.ones(1)], lambda carry: carry.params["w"].sum()
    >>> estimate = Adjoint()(training, outer_loss, meta, carry, batches)
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
                raise ValueError(
                    f"Adjoint takes {name} as one of {options}, got {value!r}. Pass one of them."
                )
        if self.memory is not None and (not isinstance(self.memory, int) or self.memory < 1):
            raise ValueError(f"Adjoint takes memory in bytes, got {self.memory!r}. Pass a positive integer.")

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        steps = horizon(training, meta, carry, batches)
        over, notes = self._over(training, carry, batch_at(batches, 0))
        values = looks_at_value(training, meta, carry)
        (meta_leaves, meta_structure), (start, structure) = tree.flatten(meta), tree.flatten(carry)
        key = (Same(training), meta_structure, structure)

        def walk(batch_structure: tree.Structure) -> _Walk:
            return _walk(*key, batch_structure, over, values, self.compile)

        # Only a compiled step back can leave out a gradient that was kept.
        kept = tree.size(carry.params) if self.compile else 0
        schedule = Schedule(tree.size(carry), tree.size(carry) + kept)

        def outer(leaves: Leaves) -> tuple[Tensor, Cotangent]:
            return outer_pull(outer_loss, tree.unflatten(leaves, structure))

        sweep = _Sweep(walk, outer, meta_leaves, batches, schedule, keeps_seen=self.compile)
        with unfused():
            end = sweep.back(0, steps, start, self._budget(schedule, steps), None)
            after, grads = tree.unflatten(end.carry, structure), tree.unflatten(end.grads, meta_structure)
            info = findings(outer_loss, carry, after, end.value, sweep.values, sweep.sizes[::-1])
        return Estimate(end.value, grads, after, info | {"notes": notes + info["notes"]})

    def _over(self, training: Trains, carry: Any, batch: Batch) -> tuple[Over, tuple[str, ...]]:
        """Return the way to differentiate that the model supports, and what to say of it."""
        if self.over == "reverse" or not forward_fails(training, carry, batch):
            return self.over, ()
        with unfused():
            reason = forward_fails(training, carry, batch)
        if reason:
            return "reverse", (reason,)
        return "forward", ("Attention was computed unfused: torch's fused one has no second derivative.",)

    def _budget(self, schedule: Schedule, steps: int) -> int:
        """Return the bytes of carries to keep, or refuse a horizon that does not fit into the memory."""
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
    """One step ahead and one back, on the leaves of trees: a compiled function takes them faster."""

    ahead: Callable[[Leaves, Leaves, Leaves], tuple[Leaves, _Kept]]
    back: Callable[
        [Leaves, Leaves, Leaves, Leaves, Cotangent, _Kept | None], tuple[Leaves, Cotangent, Tensor]
    ]


class _Kept(NamedTuple):
    """What a step saw, on leaves."""

    value: Tensor
    grads: Leaves
    buffers: Leaves


class _End(NamedTuple):
    """How an unroll ended, and the derivatives so far: in meta, and in the carry reached going back."""

    value: Tensor
    carry: Leaves
    grads: Leaves
    cotangent: Cotangent


@lru_cache(maxsize=32)
def _walk(
    training: Same[Trains],
    meta_structure: tree.Structure,
    structure: tree.Structure,
    batch_structure: tree.Structure,
    over: Over,
    values: bool,
    compile: bool,
) -> _Walk:
    """Return the two functions; the same ones for the same training, so that each is compiled once."""
    trains, step_back = training.value, StepBack(training.value, over, values)

    def ahead(meta_leaves: Leaves, leaves: Leaves, batch: Leaves) -> tuple[Leaves, _Kept]:
        carry, meta = tree.unflatten(leaves, structure), tree.unflatten(meta_leaves, meta_structure)
        seen = trains.evaluate(carry, tree.unflatten(batch, batch_structure))
        after, _ = trains.advance(meta, carry, seen)
        grads, buffers = [seen.grads[k] for k in carry.params], [seen.buffers[k] for k in carry.buffers]
        return tree.leaves(after), _Kept(seen.value, grads, buffers)

    def back(
        meta_leaves: Leaves,
        leaves: Leaves,
        batch: Leaves,
        grads: Leaves,
        cotangent: Cotangent,
        kept: _Kept | None,
    ) -> tuple[Leaves, Cotangent, Tensor]:
        carry, meta = tree.unflatten(leaves, structure), tree.unflatten(meta_leaves, meta_structure)
        seen = None
        if kept is not None:
            seen_grads = dict(zip(carry.params, kept.grads, strict=True))
            seen = Seen(kept.value, seen_grads, dict(zip(carry.buffers, kept.buffers, strict=True)))
        d_meta, cotangent = step_back(meta, carry, tree.unflatten(batch, batch_structure), cotangent, seen)
        return tree.add(grads, tree.leaves(d_meta)), cotangent, tree.norm(cotangent)

    return _Walk(compiled(ahead), compiled(back)) if compile else _Walk(ahead, back)


class _Sweep:
    """Sweeps back over an unroll within a budget, going ahead again from carries that were kept."""

    def __init__(
        self,
        walk: Callable[[tree.Structure], _Walk],
        outer: Callable[[Leaves], tuple[Tensor, Cotangent]],
        meta: Leaves,
        batches: Batches,
        schedule: Schedule,
        keeps_seen: bool,
    ) -> None:
        self.walk, self.outer, self.meta, self.batches = walk, outer, meta, batches
        self.schedule, self.keeps_seen = schedule, keeps_seen
        self.values: list[Tensor] = []  # the loss that each step saw, from the first
        self.sizes: list[Tensor] = []  # ‖λ_t‖, from the last

    def back(self, start: int, stop: int, carry: Leaves, budget: int, end: _End | None) -> _End:
        """Return the derivatives at `start`, whose carry is given, from those at `stop` (None: the last)."""
        while distance := self.schedule.ahead(stop - start, budget):
            middle = start + distance
            kept = self._ahead(carry, start, middle)
            end = self.back(middle, stop, kept, budget - self.schedule.carry, end)
            del kept
            stop = middle
        return self._back_kept(start, stop, carry, end)

    def _ahead(self, carry: Leaves, start: int, stop: int) -> Leaves:
        for t in range(start, stop):
            carry, _ = self._step(carry, t)
        return carry

    def _back_kept(self, start: int, stop: int, carry: Leaves, end: _End | None) -> _End:
        """Go ahead keeping everything, then back."""
        kept: list[tuple[Leaves, _Kept | None]] = []
        for t in range(start, stop):
            if end is not None and t == stop - 1 and not self.keeps_seen:
                kept.append((carry, None))  # where the last step leads is known
                break
            after, seen = self._step(carry, t)
            kept.append((carry, seen if self.keeps_seen else None))
            carry = after
        if end is None:
            value, cotangent = self.outer(carry)
            self.sizes.append(tree.norm(cotangent))
            end = _End(value, carry, tree.zeros_like(self.meta), cotangent)
        value, last, grads, cotangent = end
        del end, carry
        for t in reversed(range(start, stop)):
            before, seen = kept.pop()
            batch, walk = self._at(t)
            grads, cotangent, size = walk.back(self.meta, before, batch, grads, cotangent, seen)
            self.sizes.append(size)
        return _End(value, last, grads, cotangent)

    def _step(self, carry: Leaves, t: int) -> tuple[Leaves, _Kept]:
        batch, walk = self._at(t)
        carry, seen = walk.ahead(self.meta, carry, batch)
        if t == len(self.values):
            self.values.append(seen.value)
        return carry, seen

    def _at(self, t: int) -> tuple[Leaves, _Walk]:
        """Return the leaves of a batch, and the functions for batches of its structure."""
        batch, structure = tree.flatten(batch_at(self.batches, t))
        others = [leaf for leaf in batch if not isinstance(leaf, Tensor | None)]
        if self.keeps_seen and others:
            raise TypeError(
                f"Adjoint(compile=True) takes batches of tensors, got {others[0]!r} in that of step {t}. "
                "Wrap it: torch.tensor(...)."
            )
        return batch, self.walk(structure)
