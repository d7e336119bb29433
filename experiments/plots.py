"""How runs are drawn, the same in every experiment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments import paired
from experiments.methods import LOOKS
from experiments.tables import Results


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


def training(
    path: Path, results: Results, epoch: int, epochs: int, decays: Sequence[float], what: str
) -> None:
    """Draw the training loss and the accuracy on validation images of every method; `epoch` is in steps."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    never = torch.full((epochs * epoch,), torch.nan)  # so that runs which all diverged are as long
    for name, runs in results.items():
        look, metrics = LOOKS[name], [r.metrics() for r in runs]
        losses, judged = (
            paired.gathered([*(m[column] for m in metrics), never])[:-1]
            for column in ("loss", "validation_accuracy")
        )
        means = paired.smoothed(losses, epoch)
        width, shaded = (2.2, True) if name in ("momentum", "fop") else (1.2, False)
        steps = (torch.arange(means.shape[1]) + epoch) / epoch
        band(left, steps, means, look.label, look.colour, width, shaded)
        ends = 100 * judged[:, epoch - 1 :: epoch]
        band(right, range(1, epochs + 1), ends, look.label, look.colour, width, shaded)
    left.set_ylabel("training loss, mean over an epoch (nats)")
    left.set_title(f"{what}: mean over seeds, range shaded")
    right.set_ylabel("validation accuracy (%)")
    right.set_title("Validation accuracy: mean over seeds, range shaded")
    for axes in (left, right):
        axes.set_xlabel("epochs")
        for decay in decays:
            axes.axvline(decay, color="grey", linestyle=":", linewidth=1)
            above = axes.get_xaxis_transform()
            axes.annotate("lr ÷ 10", (decay, 0.96), xycoords=above, color="grey", fontsize=8)
    left.legend(fontsize="small")
    figure.savefig(path, dpi=150)
