"""Curves over seeds, drawn the same in every experiment."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from torch import Tensor


def band(
    axes: Axes,
    x: Sequence[float] | Tensor,
    values: Tensor,
    label: str,
    colour: Any,
    width: float = 1.5,
    shaded: bool = True,
) -> None:
    """Draw the mean over seeds of values (seeds, …), and shade their range."""
    at = x.tolist() if isinstance(x, Tensor) else list(x)
    axes.plot(at, values.mean(0).tolist(), label=label, color=colour, linewidth=width)
    if shaded:
        low, high = values.amin(0).tolist(), values.amax(0).tolist()
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
