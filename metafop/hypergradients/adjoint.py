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
from metafop.hypergradients.compiling import Formed, Leaves
from metafop.hypergradients.findings import findings
from metafop.hypergradients.first_look import first_look
from metafop.hypergradients.layout import channels_last, takes_channels_last
from metafop.hypergradients.missed import Missed
from metafop.hypergradients.per_training import PerTraining
from metafop.hypergradients.repeated import check_repeated, rounding
from metafop.hypergradients.schedule import Schedule
from metafop.hypergradients.second_derivative import SecondDerivative, second_derivative
from metafop.hypergradients.unroll import (
    Cotangent,
    Over,
    Skip,
    apart,
    batch_at,
    check_skip,
    estimating,
    horizon,
    looks_at_value,
    outer_pull,
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
    `skip` names checks to leave out: "repeat", that what is taken again comes out the same; "hessian", that
    torch's second derivative is that of the gradient; "buffers", that no derivative is missed through them;
    "compiled", that what is compiled gives the same numbers.

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
    skip: Skip = ()

    def __post_init__(self) -> None:
        check_skip("Adjoint", self.skip)
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
        meta, carry = apart((meta, carry))
        with estimating():
            return self._estimate(training, outer_loss, meta, carry, batches)

    def _estimate(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        steps, first = horizon(training, meta, carry, batches), batch_at(batches, 0)
        if self.compile:
            _check_compilable(tree.leaves(first), 0)
        look = first_look(training, self.over, carry, first)
        looks = looks_at_value(training, meta, carry)
        (meta_leaves, meta_structure), (start, structure) = tree.flatten(meta), tree.flatten(carry)
        if self.compile:
            meta_leaves, start = Formed(meta_leaves), Formed(start)

        @cache
        def walk(batch_structure: tree.Structure) -> Walk:
            settings = (meta_structure, structure, batch_structure, look.over, looks)
            if not self.compile:
                return walk_of(training, *settings)
            return compiled_walk(training, (*settings, "compiled" not in self.skip))

        # Only a compiled step back can leave out a gradient that was kept.
        gradient = tree.size(carry.params) if self.compile else 0
        schedule = Schedule(tree.size(carry), tree.size(carry) + gradient)

        def outer(leaves: Leaves) -> tuple[Tensor, Cotangent]:
            value, cotangent = outer_pull(outer_loss, tree.unflatten(leaves, structure))
            return value, [x.contiguous() for x in cotangent]  # as a step back returns it: compiled once

        lay = channels_last if self.compile and _takes_channels_last(training, carry, first) else list
        missed = Missed(training, carry, steps, self.skip)
        with look.operations(), second_derivative(training, look.over, self.skip) as second:
            sweep = _Sweep(walk, outer, meta_leaves, batches, schedule, lay, structure, missed, second, self)
            sweep.back(start, self._budget(schedule, steps))
            value, after = sweep.value, tree.unflatten(sweep.last, structure)
            notes = (*look.notes, *second.notes, missed.note(outer_loss, after, value))
        grads = tree.unflatten(sweep.grads, meta_structure)
        return Estimate(
            value, grads, after, findings(after, value, grads, sweep.values, sweep.sizes[::-1], notes)
        )

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


_channels_last = PerTraining(lambda training, _, *args: takes_channels_last(training, *args))


def _takes_channels_last(training: Trains, carry: Any, batch: Batch) -> bool:
    """Return `takes_channels_last`, found once for a training and batches of a shape."""
    shapes = tuple(x.shape if isinstance(x, Tensor) else None for x in tree.leaves(batch))
    return _channels_last(training, shapes, carry, batch)


def _check_compilable(batch: Leaves, t: int) -> None:
    """Refuse a batch that holds something other than dense tensors."""
    for leaf in batch:
        if not isinstance(leaf, Tensor | None):
            raise TypeError(
                f"Adjoint(compile=True) takes batches of tensors, got {leaf!r} in that of step {t}. "
                "Wrap it: torch.tensor(...)."
            )
        if leaf is not None and leaf.layout != torch.strided:
            raise TypeError(
                f"Adjoint(compile=True) takes dense batches, got a sparse tensor in that of step {t}. "
                "Pass its to_dense(), or compile=False."
            )


class _Sweep:
    """Sweeps back over an unroll within a budget, going ahead again from carries that were kept."""

    value: Tensor  # the outer loss, once the end is reached
    last: Leaves  # the carry there
    cotangent: Cotangent  # ∂value/∂carry, where the sweep back is
    slack: list[float]  # by how much each loss may differ between the kernels of steps ahead and back

    def __init__(
        self,
        walk: Callable[[tree.Structure], Walk],
        outer: Callable[[Leaves], tuple[Tensor, Cotangent]],
        meta: Leaves,
        batches: Batches,
        schedule: Schedule,
        lay: Callable[[Leaves], Leaves],
        structure: tree.Structure,
        missed: Missed,
        second: SecondDerivative,
        settings: Adjoint,
    ) -> None:
        self.walk, self.outer, self.meta, self.batches = walk, outer, meta, batches
        self.schedule, self.lay, self.structure = schedule, lay, structure
        self.missed, self.second = missed, second
        self.keeps_seen, self.repeats = settings.compile, "repeat" not in settings.skip
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
        kept, carry, first = self._keep(start, stop, carry)
        if stop == len(self.batches):
            self.last, (self.value, self.cotangent) = carry, self.outer(carry)
            self.sizes.append(tree.norm(self.cotangent))
            self.slack = rounding(self.values) if self.keeps_seen else [0.0] * stop
        del carry  # or it would be held all the way back
        for t in reversed(range(start, stop)):
            before, seen = kept.pop()
            batch, walk = self._at(t)
            self.grads, self.cotangent, size, again = walk.back(
                self.meta, before, batch, self.grads, self.cotangent, seen
            )
            self.sizes += size
            self._check(t, first or [self.values[t]], again, self.slack[t])
            self.second.at(tree.unflatten(before, self.structure), batch_at(self.batches, t))
            first = []

    def _keep(
        self, start: int, stop: int, carry: Leaves
    ) -> tuple[list[tuple[Leaves, Leaves]], Leaves, Leaves]:
        """Go ahead, and return what each step back needs, the carry in the end, and what its step saw."""
        kept, seen = [], []
        for t in range(start, stop):
            if t == stop - 1 < len(self.batches) - 1 and not self.keeps_seen:
                kept.append((carry, []))  # where this step leads is known
                return kept, carry, []
            after, seen = self._step(carry, t)
            kept.append((carry, seen if self.keeps_seen else []))
            carry = after
        return kept, carry, seen

    def _step(self, carry: Leaves, t: int) -> tuple[Leaves, Leaves]:
        batch, walk = self._at(t)
        after, seen = walk.ahead(self.meta, carry, batch)
        if t < len(self.values):
            self._check(t, [self.values[t]], seen)
            return after, seen
        self.values.append(seen[0])
        if t in self.missed.steps:
            here = tree.unflatten(carry, self.structure)
            count = 1 + len(here.params)  # the value and the gradients, without the buffers

            def evaluate(other: Any) -> Leaves:
                return walk.ahead(self.meta, tree.leaves(other), batch)[1][:count]

            self.missed.at(t, here, batch_at(self.batches, t), seen[:count], evaluate)
        return after, seen

    def _check(self, t: int, first: Leaves, again: Leaves, slack: float = 0.0) -> None:
        if self.repeats:
            check_repeated(t, first, again, slack)

    def _at(self, t: int) -> tuple[Leaves, Walk]:
        """Return the leaves of a batch, and the functions for batches of its structure."""
        batch, structure = tree.flatten(batch_at(self.batches, t))
        if self.keeps_seen:
            _check_compilable(batch, t)
        return self.lay(batch), self.walk(structure)
