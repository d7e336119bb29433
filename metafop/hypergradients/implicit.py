"""Implicit: a run that ends at a minimum depends on the leaves of its loss by where that minimum lies."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.hypergradients.checks.buffers import MissedBuffers
from metafop.hypergradients.checks.hessian import second_derivative
from metafop.hypergradients.checks.leaves import look_at_leaves
from metafop.hypergradients.checks.repeat import check_repeated
from metafop.hypergradients.differentiation import differentiation
from metafop.hypergradients.graphs import detached
from metafop.hypergradients.info import unroll_info
from metafop.hypergradients.linear_solvers import ConjugateGradients, LinearSolver, Solution
from metafop.hypergradients.mean_gradient import MeanGradient, flat
from metafop.hypergradients.outer_loss import differentiated, value_of
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
from metafop.training import Training
from metafop.types import Estimate, Meta, OuterLoss, Progress

_CG = ConjugateGradients()


@dataclass(frozen=True)
class Implicit:
    """The hypergradient of a run that ends at a minimum of its loss, by the implicit function theorem.

    ∇J(θ, φ) = 0,    (H + damping) x = ∂outer/∂θ,    ∂value/∂φ = ∂outer/∂φ - (∂∇J/∂φ)ᵀ x    (docs/math.md, 29)

    The run takes a step for each batch; then J is the mean loss of these batches at its end, and φ the leaves
    of the loss. The steps are not differentiated, so that it takes the memory of one, and a run that is at
    its minimum already needs only one step. It finds no derivative in lr, momentum or preconditioners, for a
    minimum lies where it lies, whatever leads there. It holds the batches until it is done.

    `info` has "residual", ‖∂outer/∂θ - (H + damping) x‖ relative; "iterations"; "negative_curvature", whether
    a direction was met along which H + damping curves down; "gradient", ‖∇J‖ at the end; and "distance", how
    far a minimum is along it, ‖∇J‖³ / ⟨∇J, H ∇J⟩, in units of ‖θ‖. A note says so if that is above 1 %.

    solver: of the linear equation: `ConjugateGradients` or `Neumann`, of `metafop.hypergradients`
        (`ConjugateGradients()`).
    damping: is added to H, zero or more. It makes a singular H regular, and the hypergradient smaller (0.0).
    skip: checks to leave out, as for `Adjoint` (none).
    progress: called after each step, as by `Adjoint`, and for each product with H (None).

    >>> def ridge(params, batch, leaves):
    ...     return (params["w"] - batch).square().sum() + leaves["l2"] * params["w"].square().sum()
    >>> training, params = Training(metafop.functional.plain(ridge), SGD()), {"w": torch.zeros(2)}
    >>> meta, carry = training.init_meta(params, lr=0.25, loss={"l2": 1.0}), training.init(params)
    >>> end = lambda carry: carry.params["w"].sum()
    >>> estimate = metafop.hypergradients.implicit(training, end, meta, carry, 40 * [torch.ones(2)])
    >>> estimate.grads.loss["l2"]  # w = 1 / (1 + l2)
    tensor(-0.5000)
    """

    solver: LinearSolver = _CG
    damping: float = 0.0
    skip: Skip = ()
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_skip("Implicit", self.skip)
        check_progress("Implicit", self.progress)
        if isinstance(self.solver, type) or not callable(self.solver):
            raise TypeError(
                f"Implicit takes a linear solver, got {self.solver!r}. Pass ConjugateGradients() or "
                "Neumann()."
            )
        is_number = isinstance(self.damping, int | float) and not isinstance(self.damping, bool)
        if not (is_number and 0 <= self.damping < torch.inf):
            raise ValueError(
                f"Implicit takes a damping of zero or more, got {self.damping!r}. Pass one such as 1e-3."
            )

    def check_learnable(self, names: tuple[str, ...]) -> None:
        """Refuse to learn leaves of these `names` if there is one that the loss is not given."""
        for name in names:
            if name.partition(".")[0] != "loss":
                raise ValueError(
                    f"Implicit gives no derivative in {name.removeprefix('hyper.')!r}: a minimum lies where "
                    "it lies, whatever leads there. Learn leaves of the loss, or use adjoint."
                )

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        if not isinstance(training, Training):
            raise TypeError(
                f"Implicit differentiates the minimum of one loss, got {type(training).__name__}. "
                "Pass a Training, or use adjoint."
            )
        steps = horizon(training, meta, carry, batches)
        if not tree.leaves(meta.loss):
            raise ValueError(
                "Implicit gives the derivative in leaves of the loss, and meta has none: lr, momentum and "
                "preconditioners do not move a minimum. Pass some to init_meta(loss=...), or use adjoint."
            )
        meta, carry = accepted(meta, carry)
        with explained_errors():
            return self._estimate(training, outer_loss, meta, carry, batches, steps)

    def _estimate(
        self, training: Training, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches, steps: int
    ) -> Estimate:
        how = differentiation(training, "reverse", meta, carry, batch_at(batches, 0))
        missed = MissedBuffers(training, meta, carry, steps, self.skip)
        with how.context(), second_derivative(training, meta, "reverse", self.skip) as second:
            on_leaves = look_at_leaves(training, "reverse", self.skip, outer_loss, meta, carry, batches)
            after, values, first = self._run(training, meta, carry, batches, missed)
            outer = differentiated(outer_loss, meta, after)
            mean = MeanGradient.of(training, meta, after, batches)
            if "repeat" not in self.skip:
                for _ in range(2):  # what alternates is seen too
                    again = training.evaluate(meta, carry, batch_at(batches, 0))
                    check_repeated(0, first, tree.leaves((again.value, again.grads)))
            found = self._solved(mean, after, outer.cotangent)
            if second.record.stopped and self.solver.symmetric:
                raise ValueError(_STOPPED.format(self.solver))
            if second.is_due():
                second.look(after, mean.batches[0])
            d_loss = tree.map(torch.sub, outer.d_meta.loss, mean.pulled_in_leaves(found.solution.x))
            buffers = missed.note(partial(value_of, outer_loss, meta), after, outer.value)
        grads = detached(outer.d_meta._replace(loss=d_loss))
        notes = [*how.notes, *second.notes, *on_leaves, buffers, _MINIMUM]
        if tree.is_surely(tree.all_finite((after.params, outer.cotangent))):
            notes += found.notes(self.solver)
        info = unroll_info(after, outer.value, grads, values, notes=notes)
        return Estimate(outer.value, grads, (), after, info | found.info)

    def _run(
        self, training: Training, meta: Meta, carry: Any, batches: Batches, missed: MissedBuffers
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Take a step for each batch; return the carry in the end, each loss, and all that the first saw."""
        values, first, steps = [], [], len(batches)
        for t in range(steps):
            batch, before = batch_at(batches, t), carry
            seen = training.evaluate(meta, before, batch)
            first = first or detached(tree.leaves((seen.value, seen.grads)))
            carry, _ = detached(training.advance(meta, before, seen))
            missed.at(t, before, batch, seen, after=carry)
            values.append(detached(seen.value))
            if self.progress is not None:
                self.progress("forward", t + 1, steps)
        return carry, values, first

    def _solved(self, mean: MeanGradient, after: Any, cotangent: list[Tensor]) -> _Found:
        """Solve (H + damping) x = ∂outer/∂θ, and see how far from a minimum the run has ended."""
        product, counted = mean.product(), count(1)

        def damped(v: Tensor) -> Tensor:
            if self.progress is not None:
                self.progress("solving", next(counted), self.solver.iterations)
            return product(v) + self.damping * v

        solution = self.solver(damped, flat(_in_params(after, cotangent)))
        gradient, size = flat(mean()), flat(mean.inputs.params).norm()
        steepness, curvature = gradient.norm(), gradient @ product(gradient)
        positive = curvature > 0
        distance = torch.where(positive, steepness**3 / torch.where(positive, curvature, 1.0), torch.inf)
        return _Found(solution, steepness, torch.where(steepness == 0, 0.0, distance / size))


implicit = Implicit()

_MINIMUM = (
    "Hyperparameters, preconditioners and the start have no derivative here but that of the outer loss: "
    "whatever leads to a minimum, it lies where it lies."
)
_STOPPED = (
    "Implicit was given a loss that stops a gradient, whose second derivative is not symmetric, and {} "
    "solves symmetric equations alone. Pass Implicit(solver=Neumann()), or use adjoint."
)


class _Found(NamedTuple):
    solution: Solution
    gradient: Tensor  # its norm
    distance: Tensor

    @property
    def info(self) -> dict[str, Tensor]:
        _, residual, iterations, negative, _ = self.solution
        return {
            "residual": residual,
            "iterations": iterations,
            "negative_curvature": negative,
            "gradient": self.gradient,
            "distance": self.distance,
        }

    def notes(self, solver: LinearSolver) -> list[str]:
        """Say what makes the solution doubtful, or refuse what is none."""
        _, residual, iterations, negative, singular = self.solution
        if singular:
            raise ValueError(
                "The Hessian at the end of the run is singular: it has no curvature in a direction in which "
                "the outer loss changes. Penalize that direction in the loss, or pass Implicit(damping=1e-3)."
            )
        notes = []
        if negative:
            notes.append(
                "The curvature was negative on the way, so that the run has not ended at a minimum, and this "
                f"hypergradient is not that of one: a residual of {residual:.2g} is left. Train longer, pass "
                "damping, or use adjoint."
            )
        elif not residual <= _LARGE_RESIDUAL:
            notes.append(
                f"{solver} left a residual of {residual:.2g} after {int(iterations)} iterations. Allow more, "
                "pass damping, or precondition: ConjugateGradients(probes=20)."
            )
        if not self.distance <= _LARGE_DISTANCE:
            notes.append(
                f"The run has not ended at a minimum of its loss: the gradient is {self.gradient:.2g} there, "
                f"and along it a minimum is {self.distance:.1%} of ‖θ‖ away. Train longer on these batches, "
                "put weight decay into the loss, or use adjoint."
            )
        return notes


_LARGE_RESIDUAL, _LARGE_DISTANCE = 1e-3, 1e-2


def _in_params(carry: Any, cotangent: list[Tensor]) -> list[Tensor]:
    """Return the part of a cotangent that is of parameters, or refuse one that is of more."""
    places = tree.param_places(len(cotangent), tree.partition(carry)[1])
    rest = [x for i, x in enumerate(cotangent) if i not in places]
    if any(tree.is_surely(x.any()) for x in rest):
        raise ValueError(
            "The outer loss depends on the optimizer's state, which no minimum of the loss determines. "
            "Compute it from carry.params, or use adjoint."
        )
    return [cotangent[place] for place in places]
