"""Is an estimator right? Against the whole graph, and against differences of whole runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from metafop import leaf_names, tree
from metafop.hypergradients import Implicit, ReversibleAdjoint, autograd
from metafop.hypergradients.outer_loss import value_of
from metafop.hypergradients.validation import check_estimator as check_is_estimator
from metafop.hypergradients.validation import check_learnable
from metafop.optimizers import ReversibleMomentum
from metafop.protocols import Estimator, Trains
from metafop.training import Training
from metafop.types import Estimate
from metafop.verify.comparison import Comparison, Values
from metafop.verify.problems import Problem, at_minimum, several_steps
from metafop.verify.report import Report, brief


def check_estimator(
    estimator: Estimator,
    problem: Problem | None = None,
    parts: tuple[str, ...] = ("hyper", "precond", "loss", "start"),
    numbers: int = 12,
    directions: int = 3,
    seed: int = 0,
) -> Report:
    """Check an estimator, of the library or of your own, in every part of meta and in the start.

    What it finds is compared with `autograd`, the derivative of the whole graph, and with differences of
    whole runs, as by `check_hypergradient`. Left out are leaves in which it says that it finds no derivative
    (`check_learnable`), and the start if it returns none.

    estimator: the one to check. One that is off by noise or by truncation is found to be off.
    problem: what it is given: a `Problem(training, outer_loss, meta, carry, batches)` in float64, such as
        `several_steps(Adam(), lr=0.1)` (None: `several_steps()`, with `ReversibleMomentum` for `reversible`;
        `at_minimum()` for an `Implicit`).
    parts: names of leaves, or the starts of some; "start" stands for the parameters at the start (all).
    numbers: a leaf of more numbers is large, and so many of it are looked at (12).
    directions: how many directions of a large leaf are looked at besides (3).
    seed: of the problem, and of the random choice of both (0).

    >>> from metafop import hypergradients, verify
    >>> verify.check_estimator(hypergradients.adjoint).ok
    True
    """
    check_is_estimator("check_estimator", estimator)
    given, smooth = _suiting(estimator, seed) if problem is None else 2 * (Problem._make(problem),)
    estimate, whole_graph = estimator(*given), autograd(*given)
    claimed, expected = _named(estimate), _named(whole_graph)
    compared = Comparison(
        f"{brief(estimator)}, {_name(given.training)}",
        _run(smooth),
        _values(smooth),
        whole_graph.value.item(),
        numbers,
        directions,
        seed,
    )
    names = [k for k in compared.values if k.startswith(parts) and k in claimed and _finds(estimator, k)]
    if not names:
        raise ValueError(
            f"{compared.what} finds no derivative in what starts with one of {parts}. Name some of "
            f"{list(claimed)}."
        )
    return Report(tuple(compared.row(name, claimed[name], expected[name]) for name in names))


def _suiting(estimator: Estimator, seed: int) -> tuple[Problem, Problem]:
    """Return a problem of which an estimator finds the derivative, and the one to take differences of.

    That is another if the first rounds: of a rounding the derivative is taken to be 1.
    """
    if isinstance(estimator, Implicit):
        problem = at_minimum(seed)
        return problem, problem
    smooth = several_steps(seed=seed)
    if isinstance(estimator, ReversibleAdjoint):
        return several_steps(ReversibleMomentum(), seed=seed, **smooth.meta.hyper._asdict()), smooth
    return smooth, smooth


def _name(training: Trains) -> str:
    return brief(training.optimizer) if isinstance(training, Training) else type(training).__name__


def _values(problem: Problem) -> Values:
    """Return what a run depends on and may be learned: meta, but for times, and the first parameters."""
    times = leaf_names.times(problem.meta)
    named = tree.named(problem.meta) | tree.named(problem.carry.params, "start")
    return {name: x for name, x in named.items() if name not in times}


def _named(estimate: Estimate) -> Values:
    start = tree.named(estimate.start.params, "start") if estimate.start else {}
    return tree.named(estimate.grads) | start


def _finds(estimator: Estimator, name: str) -> bool:
    try:
        check_learnable(estimator, (name,))
    except ValueError:
        return False
    return True


def _run(problem: Problem) -> Callable[[Values], float]:
    """Return the outer loss after all steps as a function of what it depends on."""
    training, outer_loss, meta, carry, batches = problem
    own = tree.named(meta).keys()

    @torch.no_grad()
    def run(values: Values) -> float:
        moved = tree.replace(meta, {k: x for k, x in values.items() if k in own})
        now = tree.with_params(carry, [values[f"start.{k}"] for k in carry.params])
        for t in range(len(batches)):
            now, _ = training.step(moved, now, batches[t])
        return value_of(outer_loss, moved, now).item()

    return run
