"""Every combination that the library has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from metafop.optimizers import SGD, Adam, Momentum
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
from metafop.protocols import Optimizer, Preconditioner
from metafop.verify.report import Report, Row
from metafop.verify.rules import check


def built_in() -> Iterator[Report]:
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


def _worst_by_part(rows: Iterable[Row]) -> list[Row]:
    worst: dict[str, Row] = {}
    for row in rows:
        worst[row.part] = Report((worst.get(row.part, row), row)).worst
    return list(worst.values())
