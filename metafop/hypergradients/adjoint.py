"""The adjoint: a forward pass that keeps carries only, and a backward pass, one step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import isqrt
from typing import Any, Literal, get_args

from metafop import tree
from metafop.hypergradients.backward_pass import BackwardPass, Checks
from metafop.hypergradients.checkpointing import Checkpointing
from metafop.hypergradients.checks.buffers import MissedBuffers
from metafop.hypergradients.checks.hessian import second_derivative
from metafop.hypergradients.checks.leaves import look_at_leaves
from metafop.hypergradients.compiled_steps import CompiledSteps, check_compilable
from metafop.hypergradients.differentiation import differentiation
from metafop.hypergradients.info import unroll_info
from metafop.hypergradients.outer_loss import differentiated, value_of
from metafop.hypergradients.step_vjp import Over, StepVJP, depends_on_value
from metafop.hypergradients.steps import EagerSteps
from metafop.hypergradients.validation import (
    Skip,
    accepted,
    batch_at,
    check_progress,
    check_skip,
    explained_errors,
    horizon,
)
from metafop.protocols import Batches, Trains
from metafop.types import Estimate, Meta, OuterLoss, Progress

Keep = Literal["all", "sqrt", "log"]


@dataclass(frozen=True)
class Adjoint:
    """The exact hypergradient through T steps, from carries alone: no graph outlives its step.

    λ_T = ∂value/∂carry_T,    (∂value/∂meta, λ_t) += VJP of step t of λ_(t+1)    (docs/math.md, 19)

    keep: which carries wait for the backward pass: "all" of them; with "sqrt" so many that about √T are held
        at once, all told (16 of a horizon below 256), and as a rule steps are taken two or three times; with
        "log" about log₂ T, and steps are taken more often (docs/math.md, 20) (None, which is "all" without
        `memory`). Besides there are always the last carry and what one step back needs.
    memory: instead, a budget in bytes: as many are kept as fit; with both, `keep` is refused if it needs more
        (None, no limit).
    compile: builds the steps, forward and back, by torch's compiler: once for a training and for each shape
        of batches, however many steps and estimates follow (False). What the loss closes over is compiled in:
        it must not change. Images are then given to convolutions channels last, which is faster on a CPU, if
        the model takes them so.
    over: how the gradient is differentiated: "reverse", faster as a rule, or "forward" ("reverse"). Where
        torch cannot do it forward, a note says so and it is done in reverse.
    skip: checks to leave out: "repeat", that what is taken again comes out the same; "hessian", that no
        derivative is hidden in the loss; "buffers", that no derivative is missed through them; "compiled",
        that what is compiled gives the same numbers (none).
    progress: called after each step with "forward" or "backward", how many were taken, and T, such as
        `metafop.progress.Line()` (None).

    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> meta, carry = training.init_meta(params, lr=0.25), training.init(params)
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
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_skip("Adjoint", self.skip)
        check_progress("Adjoint", self.progress)
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
        meta, carry = accepted(meta, carry)
        with explained_errors():
            return self._estimate(training, outer_loss, meta, carry, batches)

    def _estimate(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        steps, first = horizon(training, meta, carry, batches), batch_at(batches, 0)
        if self.compile:
            check_compilable(tree.leaves(first), 0)
        how = differentiation(training, self.over, meta, carry, first)
        step_vjp = StepVJP(training, how.over, depends_on_value(training, meta, carry))
        if self.compile:
            taken = CompiledSteps(step_vjp, meta, carry, batches, "compiled" not in self.skip)
        else:
            taken = EagerSteps(training, meta, batches, step_vjp)
        # A compiled step back leaves out the gradient that was kept.
        gradient = tree.size(carry.params) if self.compile else 0
        checkpointing = Checkpointing(tree.size(carry), tree.size(carry) + gradient)
        missed = MissedBuffers(training, meta, carry, steps, self.skip)
        with how.context(), second_derivative(training, meta, "reverse", self.skip) as second:
            on_leaves = look_at_leaves(training, "reverse", self.skip, outer_loss, meta, carry, batches)
            checks = Checks("repeat" not in self.skip, second, missed, self.progress)
            there_and_back = BackwardPass(
                taken, partial(differentiated, outer_loss, meta), batches, checkpointing, checks
            )
            done = there_and_back(carry, self._budget(checkpointing, steps))
            buffers = missed.note(partial(value_of, outer_loss, meta), done.carry, done.value)
        notes = (*how.notes, *second.notes, *on_leaves, buffers)
        info = unroll_info(done.carry, done.value, done.grads, done.values, done.sizes, notes)
        start = tree.derivative(carry, done.start)
        return Estimate(done.value, done.grads, start, done.carry, info)

    def _budget(self, checkpointing: Checkpointing, steps: int) -> int:
        """Return the bytes of carries to keep, or refuse a horizon that does not fit into the memory."""
        rules = {
            "all": checkpointing.whole * steps - checkpointing.carry,
            "sqrt": checkpointing.carry * (max(isqrt(steps), 16) - _BESIDES),
            "log": checkpointing.carry * steps.bit_length(),
        }
        rule = self.keep or ("all" if self.memory is None else "log")
        needed = min(rules[rule], rules["all"])
        if self.memory is None:
            return needed
        if needed > self.memory:
            raise ValueError(
                f"A horizon of {steps} steps with carries of {checkpointing.carry:,} bytes needs {needed:,} "
                f"bytes to keep {rule!r}, and memory={self.memory:,}. "
                "Give more memory, or take a shorter horizon."
            )
        return needed if self.keep else min(self.memory, rules["all"])


adjoint = Adjoint()

_BESIDES = 3  # carries held besides those that wait: the last one, and λ before and after a step
