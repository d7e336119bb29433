"""Training loss and validation accuracy of every method over training, in one figure."""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from experiments.reporting import statistics
from experiments.reporting.plots import band
from experiments.vision.methods import METHODS
from experiments.vision.result_tables import Results

DRAWN = ("loss", "validation_accuracy")  # columns of `metrics.csv`


def draw_training(
    path: Path, results: Results, epoch: int, epochs: int, decays: Sequence[float], what: str
) -> None:
    """Draw the training loss of every method, and the accuracy if there are validation images.

    `epoch` is in steps. A run that diverged is drawn as far as all of its method came.
    """
    never = torch.full((epochs * epoch,), torch.nan)  # so that all are as long
    found = {
        name: [statistics.gathered([*(m[column] for m in metrics), never])[:-1] for column in DRAWN]
        for name, metrics in ((name, [r.metrics() for r in runs]) for name, runs in results.items())
    }
    validated = any(accuracy.isfinite().any() for _, accuracy in found.values())
    figure = Figure(figsize=(12 if validated else 6.5, 4.6), layout="constrained")
    panels = figure.subplots(1, 2 if validated else 1, squeeze=False)[0]
    for name, (losses, accuracy) in found.items():
        width, shaded = (2.2, True) if name in ("momentum", "fop") else (1.2, False)
        label, colour = f"{METHODS[name].label} ({len(losses)} seeds)", METHODS[name].colour
        means = statistics.smoothed(losses, epoch)
        steps = (torch.arange(means.shape[1]) + epoch) / epoch
        band(panels[0], steps, means, label, colour, width, shaded)
        if validated:
            ends = 100 * accuracy[:, epoch - 1 :: epoch]
            band(panels[1], range(1, epochs + 1), ends, label, colour, width, shaded)
            panels[1].set_ylabel("validation accuracy (%)")
    panels[0].set_ylabel("training loss, mean over an epoch (nats)")
    for axes in panels:
        axes.set_xlabel("epochs")
        for decay in decays:
            axes.axvline(decay, color="grey", linestyle=":", linewidth=1)
            above = axes.get_xaxis_transform()
            axes.annotate("lr ÷ 10", (decay, 0.02), xycoords=above, color="grey", fontsize=8)
    panels[0].legend(fontsize="small")
    figure.suptitle(f"{what}\nmean over seeds; shaded, of momentum and FOP, the range")
    figure.savefig(path, dpi=150)
