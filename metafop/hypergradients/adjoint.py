"""The adjoint: a sweep ahead that keeps carries only, and a sweep back, one step at a time."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from metafop import tree
from metafop.hypergradients.compiling import Same
from metafop.hypergradients.findings import findings
from metafop.hypergradients.schedule import Schedule
from metafop.hypergradients.unroll import (
    Cotangent,
    Over,
    apart,
    batch_at,
    forward_fails,
    horizon,
    looks_at_value,
    outer_pull,
    unfused,
)
from metafop.hypergradients.walk import Kept, Leaves, Walk, compiled_walk, walk_of
from metafop.types import Batch, Batches, Estimate, Meta, OuterLoss, Trains

Keep = Literal["all", "sqrt", "log"]


@dataclass(frozen=True)
class Adjoint:
    """The exact hypergradient through T steps, from carries alone: no graph outlives its step.

    λ_T = ∂value/∂carry_T,    (∂value/∂meta, λ_t) += pullback of step t of λ_(t+1)    (docs/math.md, 19)

    `keep` says which carries wait for the sweep back: "all" of them, about √(2T) ("sqrt"), every step
    taken at most twice, or about log₂ T ("log"), a few times (docs/math.md, 20). Instead, `memory` gives a
    budget in bytes, and as many are kept as fit; with both, the rule is refused if it needs more. Besides
    there are always the last carry and what one step back needs.

    `compile` runs every step, ahead and back, through torch.compile: once for a training, however many steps
    and estimates follow. Numbers that the loss closes over are compiled in: they must not change.
    `over` is how the gradient is differentiated, in "reverse" or "forward"; None takes what is faster as a
    rule: forward for compiled convolutions, else reverse. Where torch cannot do it forward, a note says so
    and it is done in reverse.

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
    over: Over | None = None

    def __post_init__(self) -> None:
        for name, value, options in (
            ("keep", self.keep, (None, *get_args(Keep))),
            ("over", self.over, (None, *get_args(Over))),
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
        steps, (meta, carry) = horizon(training, meta, carry, batches), apart((meta, carry))
        over, notes = self._over(training, carry, batch_at(batches, 0))
        looks = looks_at_value(training, meta, carry)
        (meta_leaves, meta_structure), (start, structure) = tree.flatten(meta), tree.flatten(carry)

        @cache
        def walk(batch_structure: tree.Structure) -> Walk:
            settings = (meta_structure, structure, batch_structure, over, looks)
            return compiled_walk(Same(training), *settings) if self.compile else walk_of(training, *settings)

        # Only a compiled step back can leave out a gradient that was kept.
        kept = tree.size(carry.params) if self.compile else 0
        schedule = Schedule(tree.size(carry), tree.size(carry) + kept)

        def outer(leaves: Leaves) -> tuple[Tensor, Cotangent]:
            return outer_pull(outer_loss, tree.unflatten(leaves, structure))

        sweep = _Sweep(walk, outer, meta_leaves, batches, schedule, keeps_seen=self.compile)
        with unfused():
            end = sweep.back(steps, start, self._budget(schedule, steps))
            after, grads = tree.unflatten(end.carry, structure), tree.unflatten(end.grads, meta_structure)
            info = findings(
                training, outer_loss, batches, carry, after, end.value, grads, sweep.values, sweep.sizes[::-1]
            )
        return Estimate(end.value, grads, after, info | {"notes": notes + info["notes"]})

    def _over(self, training: Trains, carry: Any, batch: Batch) -> tuple[Over, tuple[str, ...]]:
        """Return the way to differentiate that the model supports, and what to say of it."""
        kernels = any(param.dim() > 2 for param in carry.params.values())
        over = self.over or ("forward" if self.compile and kernels else "reverse")
        if over == "reverse" or not forward_fails(training, carry, batch):
            return over, ()
        with unfused():
            reason = forward_fails(training, carry, batch)
        if reason:
            return "reverse", (reason,)
        return "forward", ("Attention was computed unfused: torch's fused one has no second derivative.",)

    def _budget(self, schedule: Schedule, steps: int) -> int:
        """Return the bytes of carries to keep, or refuse a horizon that does not fit into the memory."""
        rules = {
            "all": schedule.whole * steps,
            "sqrt": schedule.least(steps, passes=2),
            "log": schedule.carry * steps.bit_length(),
        }
        rule = self.keep or ("all" if self.memory is None else "log")
        needed = min(rules[rule], rules["all"])
        if self.memory is None:
            return needed
        if needed > self.memory:
            raise ValueError(
                f"A horizon of {steps} steps with carries of {schedule.carry:,} bytes needs {needed:,} bytes "
                f"to keep {rule!r}, and memory={self.memory:,}. Give more memory, or take a shorter horizon."
            )
        return needed if self.keep else min(self.memory, rules["all"])


adjoint = Adjoint()


class _End(NamedTuple):
    """How an unroll ended, and the derivatives so far: in meta, and in the carry reached going back."""

    value: Tensor
    carry: Leaves
    grads: Leaves
    cotangent: Cotangent


class _Sweep:
    """Sweeps back over an unroll within a budget, going ahead again from carries that were kept."""

    def __init__(
        self,
        walk: Callable[[tree.Structure], Walk],
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

    def back(self, steps: int, carry: Leaves, budget: int) -> _End:
        """Go ahead `steps` steps from a carry, and back to it."""
        waiting, stop, end = [(0, carry, budget)], steps, None
        while waiting:
            start, carry, budget = waiting[-1]
            if distance := self.schedule.ahead(stop - start, budget):
                middle = start + distance
                waiting.append((middle, self._ahead(carry, start, middle), budget - self.schedule.carry))
            else:
                waiting.pop()
                end, stop = self._back_kept(start, stop, carry, end), start
        assert end is not None
        return end

    def _ahead(self, carry: Leaves, start: int, stop: int) -> Leaves:
        for t in range(start, stop):
            carry, _ = self._step(carry, t)
        return carry

    def _back_kept(self, start: int, stop: int, carry: Leaves, end: _End | None) -> _End:
        """Go ahead from `start` keeping everything, then back from `stop` (None: the end of all steps)."""
        kept: list[tuple[Leaves, Kept | None]] = []
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

    def _step(self, carry: Leaves, t: int) -> tuple[Leaves, Kept]:
        batch, walk = self._at(t)
        carry, seen = walk.ahead(self.meta, carry, batch)
        if t == len(self.values):
            self.values.append(seen.value)
        return carry, seen

    def _at(self, t: int) -> tuple[Leaves, Walk]:
        """Return the leaves of a batch, and the functions for batches of its structure."""
        batch, structure = tree.flatten(batch_at(self.batches, t))
        others = [leaf for leaf in batch if not isinstance(leaf, Tensor | None)]
        if self.keeps_seen and others:
            raise TypeError(
                f"Adjoint(compile=True) takes batches of tensors, got {others[0]!r} in that of step {t}. "
                "Wrap it: torch.tensor(...)."
            )
        return batch, self.walk(structure)
