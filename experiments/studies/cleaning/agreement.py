"""Whether the derivative at the end of a long run agrees with that through all its steps, and their times."""

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch.nn.functional import cosine_similarity

from experiments.studies.cleaning.problem import Problem, clean
from metafop.hypergradients import ConjugateGradients, Implicit, adjoint

T = TypeVar("T")
TOLERANCE = 1e-3  # of the residual of conjugate gradients


class Agreement(NamedTuple):
    """The cosine of the two derivatives in the weights, how far the run ended from a minimum, and times.

    Times are of all cores: of the steps alone; of the adjoint, steps forward and back; of implicit, which
    takes one step more from their end.
    """

    cosine: float
    distance: float  # relative to the size of the parameters
    iterations: int
    run: float
    adjoint: float
    implicit: float

    @property
    def ratio(self) -> float:
        return self.implicit / self.adjoint

    @property
    def ratio_with_run(self) -> float:
        return (self.run + self.implicit) / self.adjoint


def measured(problem: Problem, steps: int) -> Agreement:
    batches = steps * [problem.digits.training]
    given = (problem.training, lambda carry: clean(carry.params, problem.digits.validation), problem.meta)
    at_end = Implicit(ConjugateGradients(tolerance=TOLERANCE))

    def run() -> None:
        carry = problem.carry
        for batch in batches:
            carry, _ = problem.training.step(problem.meta, carry, batch)

    run_seconds, _ = timed(run)
    adjoint_seconds, through_all = timed(lambda: adjoint(*given, problem.carry, batches))
    implicit_seconds, found = timed(lambda: at_end(*given, through_all.carry, batches[:1]))
    weights, others = (estimate.grads.loss["weights"] for estimate in (through_all, found))
    return Agreement(
        cosine=cosine_similarity(weights.double(), others.double(), dim=0).item(),
        distance=found.info["distance"].item(),
        iterations=int(found.info["iterations"]),
        run=run_seconds,
        adjoint=adjoint_seconds,
        implicit=implicit_seconds,
    )


def timed(function: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    result = function()
    return time.process_time() - began, result
