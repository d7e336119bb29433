"""Exact reversal: a forward pass that keeps nothing, and a backward pass that undoes each step."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.hypergradients.checks.buffers import MissedBuffers
from metafop.hypergradients.checks.hessian import second_derivative
from metafop.hypergradients.checks.leaves import look_at_leaves
from metafop.hypergradients.checks.repeat import check_repeated
from metafop.hypergradients.differentiation import Differentiation, differentiation
from metafop.hypergradients.info import unroll_info
from metafop.hypergradients.outer_loss import differentiated, value_of
from metafop.hypergradients.recorded_step import RecordedVJP
from metafop.hypergradients.step_vjp import StepVJP
from metafop.hypergradients.validation import (
    Skip,
    accepted,
    batch_at,
    check_progress,
    check_skip,
    explained_errors,
    horizon,
)
from metafop.protocols import Batches, Reversible, Trains
from metafop.training import Training
from metafop.types import Batch, Buffers, Carry, Estimate, Meta, OuterLoss, Params, Progress


@dataclass(frozen=True)
class ReversibleAdjoint:
    """The exact hypergradient through T steps from the last carry alone (Maclaurin et al., 2015).

    carry_t = undo(carry_(t+1)),    (∂value/∂meta, λ_t) += VJP of step t of λ_(t+1)

    Every bit is that of `adjoint`, whose step back this is, for one gradient more a step. Memory does not
    grow with T but by the optimizer's full stores: info has "store_bits", those of all words of its stores,
    saved and in use, and "bits_per_parameter_step", the same divided by parameters and steps.

    Integer buffers, such as a seed or a count, are kept for each step. Others cannot be undone, and the last
    ones stand in for all: right wherever the gradient does not depend on them, as batch norm's in training
    mode. That the pass came back to the start is checked; a training that diverged, or left the range that
    is exact, is noted with its step, and NaN stands for grads. (docs/math.md, 24)

    skip: checks to leave out, as for `Adjoint` (none).
    progress: called after each step, as by `Adjoint` (None).

    >>> from metafop.optimizers import ReversibleMomentum
    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> ball, params = ReversibleMomentum(), {"w": torch.zeros(1)}
    >>> training = Training(loss, ball)
    >>> meta, carry = training.init_meta(params, lr=0.25, momentum=0.5), training.init(params)
    >>> batches, reversible = 2 * [torch.ones(1)], ReversibleAdjoint()
    >>> estimate = reversible(training, lambda carry: carry.params["w"].sum(), meta, carry, batches)
    >>> estimate.value, estimate.grads.hyper.lr  # w = 1 - (1 - 2 lr)² + lr
    (tensor(1.), tensor(3.))
    """

    skip: Skip = ()
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_skip("ReversibleAdjoint", self.skip)
        check_progress("ReversibleAdjoint", self.progress)

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        with explained_errors():
            meta, carry = accepted(meta, carry)
            path = _path(training, meta, carry, batches)
            horizon(training, meta, carry, batches)
            how = differentiation(training, "reverse", meta, carry, batch_at(batches, 0))
            with how.context():
                return self._there_and_back(path, outer_loss, how)

    def _there_and_back(self, path: _Path, outer_loss: OuterLoss, how: Differentiation) -> Estimate:
        training, meta, steps = path.training, path.meta, len(path.batches)
        missed = MissedBuffers(training, meta, path.carry, steps, self.skip)
        last, values, saved, integers = path.forward(missed, self._tell(steps))
        words = sum(x.numel() for x in tree.leaves((last.params, saved)))  # a store has one for each number
        value, cotangent, grads = differentiated(outer_loss, meta, last)
        sizes = [tree.norm(cotangent)]
        step_vjp = RecordedVJP(training) if how.recordable else StepVJP(training)
        with second_derivative(training, meta, "reverse", self.skip) as second:
            on_leaves = look_at_leaves(
                training, "reverse", self.skip, outer_loss, meta, path.carry, path.batches
            )
            if tree.all_finite(last.params):
                for t, before, batch, value_before in path.backward(last, values, saved, integers):
                    d_meta, cotangent, again = step_vjp(meta, before, batch, cotangent)
                    if "repeat" not in self.skip:
                        check_repeated(t, [value_before], [again.value])
                    if second.is_due():
                        second.look(before, batch)
                    grads = tree.add(grads, d_meta)
                    sizes.append(tree.norm(cotangent))
                    self._tell(steps)("backward", len(sizes) - 1)
            else:  # what is not a number cannot be undone
                nan: Any = tree.map(lambda x: torch.full_like(x, torch.nan), (meta, cotangent))
                (grads, cotangent), sizes = nan, []
        buffers = missed.note(partial(value_of, outer_loss, meta), last, value)
        notes = (*how.notes, *second.notes, *on_leaves, buffers)
        info = unroll_info(last, value, grads, values, sizes[::-1], notes)
        info["store_bits"] = torch.tensor(64 * words)
        info["bits_per_parameter_step"] = info["store_bits"] / (
            steps * sum(p.numel() for p in last.params.values())
        )
        return Estimate(value, grads, tree.derivative(path.carry, cotangent), last, info)

    def _tell(self, steps: int) -> Callable[[str, int], None]:
        progress = self.progress
        return lambda what, done: None if progress is None else progress(what, done, steps)


reversible = ReversibleAdjoint()


@dataclass(frozen=True)
class _Path:
    """The steps that start from `carry`, to be taken and undone."""

    training: Training
    optimizer: Reversible
    meta: Meta
    carry: Carry
    batches: Batches

    def forward(
        self, missed: MissedBuffers, tell: Callable[[str, int], None]
    ) -> tuple[Carry, list[Tensor], dict[int, Params], list[Buffers]]:
        """Return the carry after all steps, the loss and the integer buffers that each saw, and the stores
        that each emptied.
        """
        now, values, saved, integers = self.carry, [], {}, []
        for t in range(len(self.batches)):
            batch = batch_at(self.batches, t)
            if emptied := self.optimizer.emptied(self.meta.hyper, now.opt):
                saved[t] = emptied
            integers.append({k: b for k, b in now.buffers.items() if not tree.is_inexact(b)})
            seen = self.training.evaluate(self.meta, now, batch)
            missed.at(t, now, batch, seen)
            now, _ = self.training.advance(self.meta, now, seen)
            values.append(seen.value)
            tell("forward", t + 1)
        return now, values, saved, integers

    def backward(
        self, last: Carry, values: list[Tensor], saved: dict[int, Params], integers: list[Buffers]
    ) -> Iterator[tuple[int, Carry, Batch, Tensor]]:
        """Yield each step from the last to the first: the carry before it, its batch, the loss that it saw.

        With the last buffers in place of its own, a step may see another loss, though not another gradient.
        """
        now, own = last, not any(tree.is_inexact(b) for b in last.buffers.values())
        for t in reversed(range(1, len(self.batches))):
            batch = batch_at(self.batches, t)
            params, half = self.optimizer.before(self.meta.hyper, now.params, now.opt)
            buffers = last.buffers | integers.pop()
            seen = self.training.evaluate(self.meta, Carry(params, half, buffers), batch)
            direction = self.training.precondition(self.meta.precond, seen.grads)
            opt = self.optimizer.undo(self.meta.hyper, params, half, direction, saved.pop(t, {}))
            now = Carry(params, opt, buffers)
            yield t, now, batch, values[t] if own else seen.value
        first = batch_at(self.batches, 0)
        self._check(now, first)
        yield 0, self.carry, first, values[0]

    def _check(self, now: Carry, first: Batch) -> None:
        """Refuse a pass that does not arrive, bit for bit, where the first step led.

        That step is one to one, so if it does, to undo it as well would lead to the start.
        """
        after, _ = self.training.step(self.meta, self.carry, first)
        if not all(map(torch.equal, tree.leaves(after[:2]), tree.leaves(now[:2]))):
            raise ArithmeticError(
                f"reversible undid {len(self.batches)} steps of {self.optimizer} without coming back to the "
                "start: a gradient was another when taken again, because it is not deterministic or depends "
                "on buffers, as in eval mode. Use a loss in training mode, or adjoint."
            )


def _path(training: Trains, meta: Meta, carry: Any, batches: Batches) -> _Path:
    """Return the steps to take, or refuse those that cannot be undone."""
    if not isinstance(training, Training) or not isinstance(training.optimizer, Reversible):
        found = training.optimizer if isinstance(training, Training) else type(training).__name__
        raise TypeError(
            "reversible needs a Training whose optimizer can be undone, such as ReversibleMomentum(), "
            f"got {found}. Use adjoint, or with little memory Adjoint(keep='log')."
        )
    if not all(map(tree.is_known, tree.leaves(meta))):
        raise TypeError(
            "reversible reads values, to see when a store is full, and was called inside vmap, grad or "
            "another transform of torch.func, or on a device without values. Call it outside, or use adjoint."
        )
    return _Path(training, training.optimizer, meta, carry, batches)
