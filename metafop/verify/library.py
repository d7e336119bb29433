"""All that the library has: each optimizer with each preconditioner, and each estimator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from metafop.hypergradients import (
    Adjoint,
    ConjugateGradients,
    Forward,
    Implicit,
    Neumann,
    Truncated,
    adjoint,
    autograd,
    forward,
    reversible,
)
from metafop.optimizers import SGD, Adam, Momentum, Scheduled
from metafop.preconditioners import (
    Bounded,
    Dense,
    Diagonal,
    Identity,
    Kronecker,
    LowRank,
    Normalized,
    Rescaled,
    Scalar,
    Spatial,
)
from metafop.protocols import Estimator, Optimizer, Preconditioner
from metafop.verify.estimators import check_estimator
from metafop.verify.problems import Problem, several_steps
from metafop.verify.report import Report, Row
from metafop.verify.rules import check


def built_in() -> Iterator[Report]:
    """Check every rule and every estimator of the library, one report for each."""
    yield from rules()
    yield from estimators()


def rules() -> Iterator[Report]:
    """Check every optimizer with every preconditioner, in every shape that they fit, one report a pair."""
    optimizers: list[Optimizer] = [SGD(), Momentum(), Momentum(nesterov=True), Adam()]
    everything, matrices, kernels = [(5,), (3, 5), (5, 3), (3, 2, 2, 2)], [(3, 5), (5, 3)], [(3, 2, 2, 2)]
    families: list[tuple[Preconditioner, list[tuple[int, ...]]]] = [
        (Identity(), everything),
        (Scalar(), everything),
        (Diagonal(), everything),
        (Dense(), everything),
        (LowRank(2), everything),
        (Spatial(), kernels),
        (Kronecker(), [*matrices, *kernels]),
        (Normalized(Scalar()), matrices),
        (Normalized(Diagonal()), matrices),
        (Normalized(Dense()), matrices),
        (Normalized(LowRank(2)), matrices),
        (Normalized(Spatial()), kernels),
        (Normalized(Kronecker()), matrices),
        (Bounded(Dense(), limit=0.5), matrices),
        (Rescaled(LowRank(2), limit=0.5), matrices),
    ]
    for optimizer in optimizers:
        for family, shapes in families:
            reports = [check(optimizer, family, shape, lr=0.05, weight_decay=0.1) for shape in shapes]
            yield Report(tuple(_worst_by_part(row for report in reports for row in report.rows)))


def estimators() -> Iterator[Report]:
    """Check every exact estimator over several steps of momentum, the adjoint of every other optimizer too,
    and `Implicit` at a minimum with every solver, one report each.

    Left out are `Evolution` and a `Truncated` of several windows, which are not exact, and compiled steps,
    whose build would take longer than most of the rest.
    """
    cases: list[tuple[Estimator, Problem | None]] = [
        (autograd, None),
        (adjoint, None),
        (Adjoint("sqrt"), several_steps(steps=20)),
        (Adjoint("log"), None),
        (Adjoint(over="forward"), None),
        (Truncated(5), None),
        (forward, None),
        (Forward(("start",)), None),
        (reversible, None),
        (adjoint, several_steps(SGD(), lr=0.3)),
        (adjoint, several_steps(Momentum(nesterov=True), lr=0.2, momentum=0.7, weight_decay=0.05)),
        (adjoint, several_steps(Adam(), lr=0.1, betas=(0.7, 0.8), eps=1e-2, weight_decay=0.1)),
        (adjoint, several_steps(Scheduled(Momentum(), 5, ("lr", "loss.l2")), lr=0.2)),
        (Implicit(ConjugateGradients(iterations=8)), None),  # as many as there are parameters
        (Implicit(ConjugateGradients(iterations=8, probes=20)), None),
        (Implicit(Neumann()), None),
    ]
    for estimator, problem in cases:
        yield check_estimator(estimator, problem)


def _worst_by_part(rows: Iterable[Row]) -> list[Row]:
    worst: dict[str, Row] = {}
    for row in rows:
        worst[row.part] = Report((worst.get(row.part, row), row)).worst
    return list(worst.values())
