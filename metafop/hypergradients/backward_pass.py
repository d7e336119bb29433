"""The forward pass that keeps carries and the backward pass, step by step, within a budget of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from metafop import tree
from metafop.hypergradients.checkpointing import Checkpointing
from metafop.hypergradients.checks.buffers import MissedBuffers
from metafop.hypergradients.checks.hessian import SecondDerivative
from metafop.hypergradients.checks.repeat import FirstStep, check_repeated, repeats_after
from metafop.hypergradients.outer_loss import Cotangent, Outer
from metafop.hypergradients.steps import Kept, Record, Steps
from metafop.hypergradients.validation import batch_at
from metafop.protocols import Batches
from metafop.types import Meta, Params, Progress, Seen


@dataclass(frozen=True)
class Checks:
    """What is looked at on the way: that repeated steps come out the same, second derivatives, buffers.

    `progress` is told of each step.
    """

    repeated: bool
    second_derivative: SecondDerivative
    buffers: MissedBuffers
    progress: Progress | None


@dataclass
class Unrolled:
    """What is known when a forward and backward pass over all steps is done."""

    carry: Any  # after all steps
    value: Tensor  # the outer loss there
    grads: Meta
    start: Cotangent  # λ_0
    values: list[Tensor]  # the loss that each step saw
    sizes: list[Tensor]  # ‖λ_t‖ for t = 0 … T


@dataclass
class BackwardPass:
    """A pass over T steps and back, going forward again from carries that were kept.

    λ_T = ∂value/∂carry_T,    (∂value/∂meta, λ_t) += VJP of step t of λ_(t+1)    (docs/math.md, 19, 20)
    """

    steps: Steps
    outer_loss: Callable[[Any], Outer]
    batches: Batches
    checkpointing: Checkpointing
    checks: Checks
    values: list[Tensor] = field(default_factory=list)  # the loss that each step saw, from the first
    sizes: list[Tensor] = field(default_factory=list)  # ‖λ_t‖, from the last
    first: FirstStep | None = None

    def __call__(self, carry: Any, budget: int) -> Unrolled:
        """Go forward over all steps from a carry, and back to it."""
        waiting, stop = [(0, self.steps.start(carry), budget)], len(self.batches)
        if self.checks.repeated and not self.steps.evaluates_again:
            self.first = FirstStep(partial(self.steps.forward, 0, waiting[0][1]), repeats_after(stop))
        while waiting:
            start, kept, budget = waiting[-1]
            if distance := self.checkpointing.distance(stop - start, budget):
                middle = start + distance
                rest = budget - self.checkpointing.carry
                waiting.append((middle, self._forward(kept, start, middle), rest))
            else:
                waiting.pop()
                self._there_and_back(start, stop, kept)
                stop = start
        after, grads = self.steps.carry(self.last), self.steps.meta_grads(self.grads)
        return Unrolled(after, self.value, grads, self.cotangent, self.values, self.sizes[::-1])

    def _forward(self, kept: Kept, start: int, stop: int) -> Kept:
        for t in range(start, stop):
            kept = self._step(t, kept)[0]
        return kept

    def _there_and_back(self, start: int, stop: int, kept: Kept) -> None:
        """Go forward from `start` keeping everything, then back from `stop`."""
        waiting, kept, last_seen = self._forward_recording(start, stop, kept)
        if stop == len(self.batches):
            self._turn_around(kept)
        del kept  # or it would be held all the way back
        for t in reversed(range(start, stop)):
            before, record = waiting.pop()
            self.grads, self.cotangent, size, again = self.steps.backward(
                t, before, record, self.grads, self.cotangent
            )
            del record
            self.sizes.append(size)
            self._tell("backward", len(self.sizes) - 1)
            if self.checks.repeated:
                check_repeated(t, last_seen or [self.values[t]], again)
            if self.checks.second_derivative.is_due():
                here = self.steps.carry(before)
                self.checks.second_derivative.look(here, batch_at(self.batches, t))
            last_seen = []

    def _turn_around(self, kept: Kept) -> None:
        """Take the outer loss at the end, and its derivative."""
        self.last = kept
        outer = self.outer_loss(self.steps.carry(kept))
        self.value, self.grads = outer.value, self.steps.start_grads(outer.d_meta)
        self.cotangent: Cotangent = [x.contiguous() for x in outer.cotangent]  # as a step back returns it
        self.sizes.append(tree.norm(self.cotangent))

    def _forward_recording(
        self, start: int, stop: int, kept: Kept
    ) -> tuple[list[tuple[Kept, Record]], Kept, list[Tensor]]:
        """Go forward, and return what each step back needs, the carry in the end, and what its step saw."""
        waiting, seen = [], []
        for t in range(start, stop):
            if t == stop - 1 < len(self.batches) - 1 and self.steps.evaluates_again:
                waiting.append((kept, ()))  # where this step leads is known
                return waiting, kept, []
            after, seen, record = self._step(t, kept)
            waiting.append((kept, record))
            kept = after
        return waiting, kept, seen

    def _step(self, t: int, kept: Kept) -> tuple[Kept, list[Tensor], Record]:
        """Return the carry after step t, what it saw, and what its step back needs."""
        after, seen, record = self.steps.forward(t, kept)
        if t < len(self.values):
            if self.checks.repeated:
                check_repeated(t, [self.values[t]], seen)
            return after, seen, record
        self.values.append(seen[0])
        self._tell("forward", t + 1)
        self._check_buffers(t, kept, seen)
        if self.first:
            self.first.look(t, seen)
        return after, seen, record

    def _check_buffers(self, t: int, kept: Kept, seen: list[Tensor]) -> None:
        if t not in self.checks.buffers.steps:
            return
        here = self.steps.carry(kept)

        def evaluate(other: Any) -> Seen:
            return _seen(here.params, self.steps.forward(t, self.steps.start(other))[1])

        self.checks.buffers.at(
            t, here, batch_at(self.batches, t), _seen(here.params, seen), evaluate=evaluate
        )

    def _tell(self, what: str, done: int) -> None:
        if self.checks.progress is not None:
            self.checks.progress(what, done, len(self.batches))


def _seen(params: Params, seen: list[Tensor]) -> Seen:
    """Return the loss and the gradients that a step saw, without buffers."""
    return Seen(seen[0], dict(zip(params, seen[1:], strict=False)), {})
