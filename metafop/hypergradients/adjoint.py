"""The adjoint: a sweep ahead that keeps carries only, and a sweep back, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import isqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from metafop import tree
from metafop.hypergradients.compiling import Formed, Leaves, Same
from metafop.hypergradients.findings import findings
from metafop.hypergradients.layout import channels_last, takes_channels_last
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
from metafop.hypergradients.walk import Walk, compiled_walk, walk_of
from metafop.types import Batch, Batches, Estimate, Meta, OuterLoss, Trains

Keep = Literal["all", "sqrt", "log"]


@dataclass(frozen=True)
class Adjoint:
    """The exact hypergradient through T steps, from carries alone: no graph outlives its step.

    λ_T = ∂value/∂carry_T,    (∂value/∂meta, λ_t) += pullback of step t of λ_(t+1)    (docs/math.md, 19)

    `keep` says which carries wait for the sweep back: "all" of them; with "sqrt" so many that about √T are
    held at once, all told (16 of a horizon below 256), and as a rule steps are taken two or three times; with
    "log" about log₂ T, and steps are taken more often (docs/math.md, 20). Instead, `memory` gives a budget in
    bytes, and as many are kept as fit; with both, the rule is refused if it needs more. Besides there are
    always the last carry and what one step back needs.

    `compile` builds the steps, ahead and back, with torch's compiler: once for a training and for each shape
    of batches, however many steps and estimates follow. What the loss closes over is compiled in: it must not
    change. Images are then given to convolutions channels last, which is faster on a CPU, if the model takes
    them so.
    `over` is how the gradient is differentiated, in "reverse", faster as a rule, or "forward". Where torch
    cannot do it forward, a note says so and it is done in reverse.

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
        if self.compile and tree.is_transforming():
            raise TypeError(
                "Adjoint(compile=True) was called inside vmap, grad or another transform of torch.func, "
                "which cannot see into what is compiled. Call it outside, or with compile=False."
            )
        steps, (meta, carry) = horizon(training, meta, carry, batches), apart((meta, carry))
        first = batch_at(batches, 0)
        over, notes = self._over(training, carry, first)
        looks = looks_at_value(training, meta, carry)
        (meta_leaves, meta_structure), (start, structure) = tree.flatten(meta), tree.flatten(carry)
        if self.compile:
            meta_leaves, start = Formed(meta_leaves), Formed(start)

        @cache
        def walk(batch_structure: tree.Structure) -> Walk:
            settings = (meta_structure, structure, batch_structure, over, looks)
            return compiled_walk(Same(training), *settings) if self.compile else walk_of(training, *settings)

        # Only a compiled step back can leave out a gradient that was kept.
        gradient = tree.size(carry.params) if self.compile else 0
        schedule = Schedule(tree.size(carry), tree.size(carry) + gradient)

        def outer(leaves: Leaves) -> tuple[Tensor, Cotangent]:
            value, cotangent = outer_pull(outer_loss, tree.unflatten(leaves, structure))
            return value, [x.contiguous() for x in cotangent]  # as a step back returns it: compiled once

        lay = channels_last if self.compile and takes_channels_last(training, carry, first) else list
        sweep = _Sweep(walk, outer, meta_leaves, batches, schedule, lay, keeps_seen=self.compile)
        with unfused():
            sweep.back(start, self._budget(schedule, steps))
            value, after = sweep.value, tree.unflatten(sweep.last, structure)
            grads = tree.unflatten(sweep.grads, meta_structure)
            info = findings(
                training, outer_loss, batches, carry, after, value, grads, sweep.values, sweep.sizes[::-1]
            )
        return Estimate(value, grads, after, info | {"notes": notes + info["notes"]})

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
        rules = {
            "all": schedule.whole * steps - schedule.carry,
            "sqrt": schedule.carry * (max(isqrt(steps), 16) - _BESIDES),
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

_BESIDES = 3  # carries held besides those that wait: the last one, and λ before and after a step


class _Sweep:
    """Sweeps back over an unroll within a budget, going ahead again from carries that were kept."""

    value: Tensor  # the outer loss, once the end is reached
    last: Leaves  # the carry there
    cotangent: Cotangent  # ∂value/∂carry, where the sweep back is

    def __init__(
        self,
        walk: Callable[[tree.Structure], Walk],
        outer: Callable[[Leaves], tuple[Tensor, Cotangent]],
        meta: Leaves,
        batches: Batches,
        schedule: Schedule,
        lay: Callable[[Leaves], Leaves],
        keeps_seen: bool,
    ) -> None:
        self.walk, self.outer, self.meta, self.batches = walk, outer, meta, batches
        self.schedule, self.lay, self.keeps_seen = schedule, lay, keeps_seen
        self.grads = [torch.zeros_like(x) for x in meta]  # ∂value/∂meta, so far
        self.values: list[Tensor] = []  # the loss that each step saw, from the first
        self.sizes: list[Tensor] = []  # ‖λ_t‖, from the last

    def back(self, carry: Leaves, budget: int) -> None:
        """Go ahead all steps from a carry, and back to it."""
        waiting, stop = [(0, carry, budget)], len(self.batches)
        while waiting:
            start, carry, budget = waiting[-1]
            if distance := self.schedule.ahead(stop - start, budget):
                middle = start + distance
                waiting.append((middle, self._ahead(carry, start, middle), budget - self.schedule.carry))
            else:
                waiting.pop()
                self._back_kept(start, stop, carry)
                stop = start

    def _ahead(self, carry: Leaves, start: int, stop: int) -> Leaves:
        for t in range(start, stop):
            carry, _ = self._step(carry, t)
        return carry

    def _back_kept(self, start: int, stop: int, carry: Leaves) -> None:
        """Go ahead from `start` keeping everything, then back from `stop`."""
        kept, carry = self._keep(start, stop, carry)
        if stop == len(self.batches):
            self.last, (self.value, self.cotangent) = carry, self.outer(carry)
            self.sizes.append(tree.norm(self.cotangent))
        del carry  # or it would be held all the way back
        for t in reversed(range(start, stop)):
            before, seen = kept.pop()
            batch, walk = self._at(t)
            self.grads, self.cotangent, size = walk.back(
                self.meta, before, batch, self.grads, self.cotangent, seen
            )
            self.sizes += size

    def _keep(self, start: int, stop: int, carry: Leaves) -> tuple[list[tuple[Leaves, Leaves]], Leaves]:
        """Go ahead, and return what each step back needs, and the carry in the end."""
        kept = []
        for t in range(start, stop):
            if t == stop - 1 < len(self.batches) - 1 and not self.keeps_seen:
                kept.append((carry, []))  # where this step leads is known
                break
            after, seen = self._step(carry, t)
            kept.append((carry, seen if self.keeps_seen else []))
            carry = after
        return kept, carry

    def _step(self, carry: Leaves, t: int) -> tuple[Leaves, Leaves]:
        batch, walk = self._at(t)
        carry, seen = walk.ahead(self.meta, carry, batch)
        if t == len(self.values):
            self.values.append(seen[0])
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
        return self.lay(batch), self.walk(structure)
