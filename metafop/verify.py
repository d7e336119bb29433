"""Is a hand-written pullback right? Closed form against autograd against finite differences, in float64.

For one's own preconditioner or update rule, one call:

    report = verify.check(preconditioner=MyFamily())
    print(report)             # every part of meta, its errors, and where the worst one sits
    assert report.ok

`python -m metafop.verify` checks every combination that the library has, and exits with 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from metafop import tree
from metafop.functional import plain
from metafop.hypergradients import by_autograd, closed_form
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
    clocks,
)
from metafop.training import Training
from metafop.types import Last, Meta, Optimizer, Params, Preconditioner

AUTOGRAD_TOLERANCE = 1e-10
DIFFERENCES_TOLERANCE = 1e-6
_DESCENT, _DENSE = SGD(), Dense()
_DESCENT_HYPER = _DESCENT.hyper(lr=0.05)


@dataclass(frozen=True)
class Row:
    """How far one part's closed form is from autograd and from finite differences, and where it is worst.

    Errors are relative to the size of the terms that are added up, Σᵢ |cᵢ| |∂θ'ᵢ/∂x|, so that terms which
    cancel do not count as disagreement. (A thousandth of Σᵢ |cᵢ| |θ'ᵢ - θᵢ| is added, for what has no
    derivative at all.)
    """

    optimizer: str
    preconditioner: str
    shape: str
    part: str
    autograd: float
    differences: float
    worst_at: str

    @property
    def ok(self) -> bool:
        return self.autograd <= AUTOGRAD_TOLERANCE and self.differences <= DIFFERENCES_TOLERANCE


@dataclass(frozen=True)
class Report:
    """The rows of a check; printed, a table."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row that is furthest beyond, or nearest to, its tolerance."""
        return max(
            self.rows,
            key=lambda row: max(row.autograd / AUTOGRAD_TOLERANCE, row.differences / DIFFERENCES_TOLERANCE),
        )

    def __str__(self) -> str:
        header = ("optimizer", "preconditioner", "shape", "part", "autograd", "differences", "worst at", "")
        lines = [header] + [
            (
                row.optimizer,
                row.preconditioner,
                row.shape,
                row.part,
                f"{row.autograd:.1e}",
                f"{row.differences:.1e}",
                row.worst_at,
                "ok" if row.ok else "WRONG",
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def check(
    optimizer: Optimizer = _DESCENT,
    hyper: Any = _DESCENT_HYPER,
    preconditioner: Preconditioner = _DENSE,
    shape: tuple[int, ...] = (4, 3),
    parts: tuple[str, ...] = ("hyper", "precond"),
    seed: int = 0,
) -> Report:
    """Check a rule's closed form for the third step of a training, in every part of meta that `parts` names.

    What is not given is gradient descent, or a `Dense` preconditioner, by which an optimizer's derivative in
    the direction shows. The parameter is named "w". The third step, because at the first some
    derivatives are exactly zero (Adam's in its betas).

    >>> from metafop import verify
    >>> verify.check(preconditioner=Dense()).ok
    True
    """
    if optimizer is not _DESCENT and hyper is _DESCENT_HYPER:
        raise ValueError(
            f"verify.check got {optimizer} without its hyper. Pass hyper={optimizer}.hyper(...) too."
        )
    training, meta, last, cotangent = _third_step(optimizer, hyper, preconditioner, shape, seed)
    closed = tree.named(closed_form(training, meta, last, cotangent))
    if closed.keys() != tree.named(meta).keys():
        raise ValueError(
            f"The pullback of {optimizer} with {preconditioner} returns the leaves {sorted(closed)}, "
            f"but meta has {sorted(tree.named(meta))}. Return a tree like meta's."
        )
    autograd = tree.named(by_autograd(training, meta, last, cotangent))
    sizes = _sizes(training, meta, last, cotangent)
    rows = []
    for name, value in tree.named(meta).items():
        if not name.startswith(parts) or name in clocks(meta.precond["w"], "precond.w"):
            continue
        if closed[name].shape != value.shape:
            raise ValueError(
                f"The pullback of {optimizer} with {preconditioner} returns {tuple(closed[name].shape)} for "
                f"{name}, of shape {tuple(value.shape)}. Return a tree of meta's shapes."
            )
        differences = _differences(training, meta, last, cotangent, name)
        by_graph = _relative(closed[name], autograd[name], sizes[name])
        by_steps = _relative(closed[name], differences, sizes[name])
        worst = by_graph if by_graph.max() > AUTOGRAD_TOLERANCE else by_steps
        place = [int(i) for i in torch.unravel_index(worst.argmax(), worst.shape)]
        rows.append(
            Row(
                repr(optimizer),
                repr(preconditioner),
                "×".join(str(n) for n in shape),
                name,
                by_graph.max().item(),
                by_steps.max().item(),
                f"{name}{place}" if place else name,
            )
        )
    if not rows:
        raise ValueError(
            f"No part of meta starts with one of {parts}: there are {sorted(closed)}. Name some."
        )
    return Report(tuple(rows))


def built_in() -> Iterator[Report]:
    """Check every optimizer with every preconditioner, in every shape that they fit, one report a pair."""
    rates = {"lr": 0.05, "weight_decay": 0.1}
    optimizers: list[tuple[Optimizer, Any]] = [
        (SGD(), SGD().hyper(**rates)),
        (Momentum(), Momentum().hyper(**rates)),
        (Momentum(nesterov=True), Momentum().hyper(**rates)),
        (Adam(), Adam().hyper(**rates)),
    ]
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
    for optimizer, hyper in optimizers:
        for family, shapes in families:
            reports = [check(optimizer, hyper, family, shape) for shape in shapes]
            yield Report(tuple(_worst_by_part(row for report in reports for row in report.rows)))


def main(arguments: list[str] | None = None) -> int:
    """Print the table of `built_in`; return 0 if every closed form is right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m metafop.verify", description="Check every closed form.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE as well")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}. Make it first.")
    start = time.perf_counter()
    report = Report(tuple(row for part in built_in() for row in part.rows))
    seconds = time.perf_counter() - start
    print(report)
    autograd = max(row.autograd for row in report.rows)
    differences = max(row.differences for row in report.rows)
    print(f"\n{sum(row.ok for row in report.rows)} of {len(report.rows)} right, in {seconds:.0f} s.")
    print(f"Worst error: {autograd:.1e} from autograd, where {AUTOGRAD_TOLERANCE:.0e} is allowed,")
    print(f"and {differences:.1e} from finite differences, where {DIFFERENCES_TOLERANCE:.0e} is allowed.")
    if not report.ok:
        worst = report.worst
        print(f"The worst is {worst.worst_at} of {worst.optimizer} with {worst.preconditioner}.")
    if options.json:
        rows = [asdict(row) | {"ok": row.ok} for row in report.rows]
        options.json.write_text(json.dumps({"ok": report.ok, "seconds": seconds, "rows": rows}, indent=2))
    return 0 if report.ok else 1


def _third_step(
    optimizer: Optimizer, hyper: Any, family: Preconditioner, shape: tuple[int, ...], seed: int
) -> tuple[Training, Meta, Last, Params]:
    """Return a training, a meta away from where it starts, its third step, and the gradient after it."""
    generator = Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=torch.float64, generator=generator)

    params = {"w": noise(torch.empty(shape))}
    curvature, target = noise(params["w"]).exp(), noise(params["w"])
    training = Training(
        plain(lambda params, batch: (curvature * (1 + (params["w"] - target + batch) ** 2).sqrt()).sum()),
        optimizer,
        {"w": family},
    )
    meta = training.meta(params, hyper, generator)
    meta = Meta(meta.hyper, tree.map(lambda m: m + 0.3 * noise(m), meta.precond))
    carry = training.init(params)
    last = Last(carry, training.evaluate(carry, torch.zeros(())), ())
    for shift in torch.linspace(-0.5, 0.5, 3, dtype=torch.float64):
        last = Last(carry, training.evaluate(carry, shift), ())
        carry, _ = training.advance(meta, carry, last.seen)
    return training, meta, last, training.evaluate(carry, torch.zeros(())).grads


def _sizes(training: Training, meta: Meta, last: Last, cotangent: Params) -> dict[str, Tensor]:
    """Return the size of the terms of the derivative in each number x of meta, as `Row` has it."""
    c = cotangent["w"]
    moved = training.advance(meta, last.carry, last.seen)[0].params["w"] - last.carry.params["w"]
    least = 1e-3 * tree.dot(c.abs(), moved.abs())
    total = {name: torch.full_like(leaf, least.item()) for name, leaf in tree.named(meta).items()}
    for i in range(c.numel()):
        one = torch.zeros_like(c).flatten().index_fill(0, torch.tensor(i), 1.0).view_as(c)
        row = tree.named(by_autograd(training, meta, last, {"w": one}))
        total = {name: size + c.flatten()[i].abs() * row[name].abs() for name, size in total.items()}
    return total


def _differences(training: Training, meta: Meta, last: Last, cotangent: Params, name: str) -> Tensor:
    """Return the derivative in the leaf `name` by central differences of fourth order."""
    leaf = tree.named(meta)[name]

    def value(leaf: Tensor) -> Tensor:
        carry, _ = training.advance(tree.replace(meta, {name: leaf}), last.carry, last.seen)
        return tree.dot(cotangent["w"], carry.params["w"])

    derivatives = []
    for i in range(leaf.numel()):
        step = 1e-5 * max(1.0, leaf.flatten()[i].abs().item())
        one = torch.zeros(leaf.numel(), dtype=leaf.dtype).index_fill(0, torch.tensor(i), step).view_as(leaf)
        near = value(leaf + one) - value(leaf - one)
        far = value(leaf + 2 * one) - value(leaf - 2 * one)
        derivatives.append((8 * near - far) / (12 * step))
    return torch.stack(derivatives).view_as(leaf)


def _relative(x: Tensor, y: Tensor, size: Tensor) -> Tensor:
    """Return |x - y| over the largest size of terms in the leaf; what is not a number counts as huge."""
    error = (x - y).abs()
    relative = torch.where(error == 0, 0.0, error / size.max())
    return relative.nan_to_num(nan=torch.finfo(relative.dtype).max)


def _worst_by_part(rows: Iterable[Row]) -> list[Row]:
    worst: dict[str, Row] = {}
    for row in rows:
        worst[row.part] = Report((worst.get(row.part, row), row)).worst
    return list(worst.values())


if __name__ == "__main__":
    sys.exit(main())
