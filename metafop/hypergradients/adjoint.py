"""The adjoint: a forward pass that keeps carries only, and a backward pass, one step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from metafop import tree
from metafop.hypergradients.backward_pass import BackwardPass, Checks
from metafop.hypergradients.checkpointing import Checkpointing
from metafop.hypergradients.checks.buffers import MissedBuffers
from metafop.hypergradients.checks.hessian import second_derivative
from metafop.hypergradients.checks.leaves import look_at_leaves
from metafop.hypergradients.compiled_steps import CompiledSteps, check_compilable
from metafop.hypergradients.differentiation import Differentiation, differentiation
from metafop.hypergradients.info import unroll_info
from metafop.hypergradients.outer_loss import differentiated, value_of
from metafop.hypergradients.step_vjp import Over, StepVJP, depends_on_value
from metafop.hypergradients.steps import RecordedSteps, Steps, TransformedSteps
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

Keep = Literal["all", "sqrt", "cbrt", "log"]


@dataclass(frozen=True)
class Adjoint:
    """The exact hypergradient through T steps, from carries alone: no graph outlives its step.

    λ_T = ∂value/∂carry_T,    (∂value/∂meta, λ_t) += VJP of step t of λ_(t+1)    (docs/math.md, 19)

    keep: how much waits for the backward pass: "all" that steps back need, so that no step is taken twice;
        with "sqrt" the least with which none is taken more than twice, and with "cbrt" more than three times,
        about √(2T) and ∛(6T) carries (or 16); with "log" about log₂ T carries, and steps are taken more often
        (docs/math.md, 20). (None, which is "sqrt"; or "all" where torch.func takes the steps, as inside a
        transform: there a step back takes its step again and needs its carry alone.) Besides there are always
        the last carry and what one step back needs.
    memory: instead, a budget in bytes: as much is kept as fits; with both, `keep` is refused if it needs more
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
        missed = MissedBuffers(training, meta, carry, steps, self.skip)
        with how.context(), second_derivative(training, meta, "reverse", self.skip) as second:
            taken = self._steps(training, how, meta, carry, batches)
            checkpointing = Checkpointing(tree.size(carry), taken.bytes_recorded)
            on_leaves = look_at_leaves(training, "reverse", self.skip, outer_loss, meta, carry, batches)
            checks = Checks("repeat" not in self.skip, second, missed, self.progress)
            there_and_back = BackwardPass(
                taken, partial(differentiated, outer_loss, meta), batches, checkpointing, checks
            )
            done = there_and_back(carry, self._budget(checkpointing, steps, taken.evaluates_again))
            buffers = missed.note(partial(value_of, outer_loss, meta), done.carry, done.value)
        notes = (*how.notes, *second.notes, *on_leaves, buffers)
        info = unroll_info(done.carry, done.value, done.grads, done.values, done.sizes, notes)
        start = tree.derivative(carry, done.start)
        return Estimate(done.value, done.grads, start, done.carry, info)

    def _steps(
        self, training: Trains, how: Differentiation, meta: Meta, carry: Any, batches: Batches
    ) -> Steps:
        """Return how the steps are taken: compiled, recorded by torch.autograd, or by torch.func."""
        if how.recordable and not self.compile:
            return RecordedSteps.of(training, meta, carry, batches)
        step_vjp = StepVJP(training, how.over, depends_on_value(training, meta, carry))
        if self.compile:
            checked = "compiled" not in self.skip
            return CompiledSteps(step_vjp, how.recordable, meta, carry, batches, checked)
        return TransformedSteps(training, meta, batches, step_vjp, tree.size(carry))

    def _budget(self, checkpointing: Checkpointing, steps: int, evaluates_again: bool) -> int:
        """Return the bytes to keep, or refuse a horizon that does not fit into the memory."""
        few = (16 - _BESIDES) * checkpointing.carry
        rules = {
            "all": checkpointing.whole * steps - checkpointing.carry,
            "sqrt": max(checkpointing.budget(steps, passes=2), few),
            "cbrt": max(checkpointing.budget(steps, passes=3), few),
            "log": checkpointing.carry * steps.bit_length(),
        }
        usual = "all" if evaluates_again else "sqrt"
        rule = self.keep or (usual if self.memory is None else "log")
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
