"""What each training digit did to the loss of each unseen one, by derivatives, and how well that predicts."""

from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Generator, Tensor
from torch.func import vmap

from experiments.studies.attribution.problem import Batch, Problem, losses
from metafop import Carry, diagnostics
from metafop.hypergradients import ConjugateGradients, Implicit, Truncated, adjoint
from metafop.protocols import Estimator

DAMPINGS = (0.03, 0.1, 0.3, 1.0)  # of the Hessian, which has negative eigenvalues
SOLVER = ConjugateGradients(iterations=30)
METHODS = {
    "adjoint": "adjoint, through the whole training",
    "one_step": "one step each, summed",
    **{f"implicit_{damping}": f"at the end alone, damping {damping}" for damping in DAMPINGS},
}


def by_method(problem: Problem, end: Carry) -> dict[str, Tensor]:
    """Return the influences by each method, of a training that leads to the carry `end`."""
    found = {
        "adjoint": influences(problem, adjoint, problem.carry, problem.batches),
        "one_step": influences(problem, Truncated(1), problem.carry, problem.batches),
    }
    for damping in DAMPINGS:
        at_end = Implicit(SOLVER, damping)
        found[f"implicit_{damping}"] = influences(problem, at_end, end, [problem.everything])
    return found


def influences(problem: Problem, estimator: Estimator, carry: Carry, batches: list[Batch]) -> Tensor:
    """Return ∂(loss of each unseen digit) / ∂(weight of each training digit), (unseen, examples)."""

    def influence(image: Tensor, label: Tensor) -> Tensor:
        unseen = (image[None], label[None])

        def outer_loss(carry: Carry) -> Tensor:
            return losses(carry.params, unseen).mean()

        estimate = estimator(problem.training, outer_loss, problem.meta, carry, batches)
        return estimate.grads.loss["weights"]

    return vmap(influence)(*problem.unseen)


def subsets(examples: int, share: float, count: int, generator: Generator) -> Tensor:
    """Return weights, (count, examples): zero for a random share of the digits, one for the others."""
    ranks = torch.rand(count, examples, generator=generator).argsort(1).argsort(1)
    return 1.0 * (ranks >= round(share * examples))


def predicted(influence: Tensor, weights: Tensor) -> Tensor:
    """Return the change of each unseen digit's loss, (runs, unseen): the sum of what was dropped."""
    return (weights - 1) @ influence.T


def correlations(predicted: Tensor, losses: Tensor) -> Tensor:
    """Return Spearman's rank correlation over the runs, for each unseen digit."""
    pairs = zip(predicted.T.tolist(), losses.T.tolist(), strict=True)
    found: list[Any] = [spearmanr(*pair) for pair in pairs]
    return torch.tensor([one.statistic for one in found], dtype=torch.float64)


def metasmoothness(problem: Problem, weights: Tensor) -> float:
    """Return that of training on the way to the weights of a subset, in two steps."""
    along = problem.meta._replace(loss={"weights": weights - 1})
    given = (problem.training, problem.meta, problem.carry, problem.batches, ("loss.weights",))
    return diagnostics.metasmoothness(*given, h=0.5, direction=along)["metasmoothness"].item()
