"""What a check found: rows, and the table of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

AUTOGRAD_TOLERANCE = 1e-10
DIFFERENCES_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Row:
    """How far the derivative in one part is from autograd and from finite differences, and where it is worst.

    Errors are relative to the size of what is compared, and at least to a thousandth of the value, or of the
    terms, that it is a derivative of: for what has no derivative at all. The size is the largest number of
    the part; for a rule, whose terms may cancel, that of the terms that are added up, Σᵢ |cᵢ| |∂θ'ᵢ/∂x|.

    what: what was checked, as text.
    part: the leaf in which the derivative is, such as "precond.w".
    autograd: the largest error of a number in it, against autograd; None where there is none to compare with.
    differences: the same against finite differences.
    compared: how many numbers of it were compared with differences, and along how many directions.
    worst_at: the number whose error is furthest off, such as "precond.w[0, 2]".
    """

    what: str
    part: str
    autograd: float | None
    differences: float
    compared: str
    worst_at: str

    @property
    def ok(self) -> bool:
        return self.badness <= 1

    @property
    def badness(self) -> float:
        """How far it is off, in tolerances: at most 1 if it is right."""
        return max((self.autograd or 0.0) / AUTOGRAD_TOLERANCE, self.differences / DIFFERENCES_TOLERANCE)


@dataclass(frozen=True)
class Report:
    """The `rows` of a check, one for each part; printed, a table."""

    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row that is furthest beyond, or nearest to, its tolerance."""
        return max(self.rows, key=lambda row: row.badness)

    def __str__(self) -> str:
        header = ("what", "part", "autograd", "differences", "compared", "worst at", "")
        lines = [header] + [
            (
                row.what,
                row.part,
                "-" if row.autograd is None else f"{row.autograd:.1e}",
                f"{row.differences:.1e}",
                row.compared,
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


def relative(x: Tensor, y: Tensor, size: Tensor) -> Tensor:
    """Return |x - y| over the largest `size` of all numbers; what is not a number counts as huge."""
    error = (x - y).abs()
    found = torch.where(error == 0, 0.0, error / size.max())
    return found.nan_to_num(nan=torch.finfo(found.dtype).max)


def place(name: str, worst: Tensor) -> str:
    """Return the name of the number in a leaf that is the largest of `worst`, such as "precond.w[0, 2]"."""
    found = [int(i) for i in torch.unravel_index(worst.argmax(), worst.shape)]
    return f"{name}{found}" if found else name


def brief(x: Any) -> str:
    """Return the `repr` of an object without the fields that have their default value."""
    if not is_dataclass(x) or isinstance(x, type):
        return repr(x)
    shown = [
        (each.name, getattr(x, each.name), each.default) for each in fields(x) if each.repr and each.init
    ]
    given = [f"{name}={brief(value)}" for name, value, default in shown if repr(value) != repr(default)]
    return f"{type(x).__name__}({', '.join(given)})"
