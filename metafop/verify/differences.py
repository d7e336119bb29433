"""The derivative of a function that can only be called, by differences, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

STEPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)


class Slope(NamedTuple):
    """A derivative by differences, and its `error`: how far it is from the estimates that it is made of."""

    value: float
    error: float


def slope(function: Callable[[float], float], enough: float) -> Slope:
    """Return the derivative at 0 by central differences, extrapolated to a step of zero (Ridders, 1982).

    D_0(h) = (f(h) - f(-h)) / 2h,    D_k(h) = D_(k-1)(h) + (D_(k-1)(h) - D_(k-1)(10 h)) / (100ᵏ - 1)

    h goes through `STEPS` until the error is small `enough`; a smooth function needs two or three of them. A
    step at which the function is not finite is left out; where it is at none, the derivative is NaN.
    """
    best, before = Slope(math.nan, math.inf), []
    for h in STEPS:
        difference = (function(h) - function(-h)) / (2 * h)
        if not math.isfinite(difference):
            before = []
            continue
        row = [difference]
        for k, coarse in enumerate(before, 1):
            row.append(row[-1] + (row[-1] - coarse) / (100**k - 1))
            best = min(best, Slope(row[k], max(abs(row[k] - x) for x in (row[-2], coarse))), key=_error)
        before = row
        if best.error <= enough:
            break
    return best


def _error(slope: Slope) -> float:
    return slope.error
