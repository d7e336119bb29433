"""What a check found: rows, and the table of them."""

from dataclasses import dataclass

AUTOGRAD_TOLERANCE = 1e-10
DIFFERENCES_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Row:
    """How far one part's closed form is from autograd and from finite differences, and where it is worst.

    Errors are relative to the size of the terms that are added up, Σᵢ |cᵢ| |∂θ'ᵢ/∂x|, so that terms which
    cancel do not count as disagreement. (A thousandth of Σᵢ |cᵢ| |θ'ᵢ - θᵢ| is added, for what has no
    derivative at all.)

    optimizer, preconditioner, shape: what was checked, as text.
    part: the leaf of meta in which the derivative is.
    autograd, differences: the largest error of a number in it, against either.
    worst_at: the number whose error is furthest off, such as "precond.w[0, 2]".
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
    """The `rows` of a check, one for each part of meta; printed, a table."""

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
