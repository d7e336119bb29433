"""The picture at the top of README: one hypergradient of the conv net, in time and in memory."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.benchmarks.unroll.report import key
from experiments.reporting.summary import Summary

SHOWN = {
    "sqrt": "metafop, compiled",
    "eager, frugal": "metafop, eager",
    "torchopt": "torchopt",
    "higher": "higher",
}
OURS, THEIRS = "#0072b2", "#d55e00"


def draw(path: Path, name: str, figures: Summary) -> None:
    """Draw seconds and peak MiB of each way of SHOWN, with the numbers beside the bars."""
    figure = Figure(figsize=(8, 1.7), layout="constrained")
    found: Any = figures
    seconds = {label: found[f"{key(name, method)}_ms"] / 1000 for method, label in SHOWN.items()}
    mib = {label: found[f"{key(name, method)}_mib"] for method, label in SHOWN.items()}
    panels = ((seconds, "%.1f s", "time"), (mib, "%.0f MiB", "memory at the peak"))
    for axes, (values, form, title) in zip(figure.subplots(1, 2), panels, strict=True):
        labels = list(reversed(values))
        colors = [OURS if label.startswith("metafop") else THEIRS for label in labels]
        bars = axes.barh(labels, [values[label] for label in labels], color=colors)
        axes.bar_label(bars, fmt=form, padding=3)
        axes.margins(x=0.25)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False)
    figure.savefig(path, dpi=150)
