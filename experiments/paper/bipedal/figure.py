"""The paper's figure: the best score so far, by steps of the environments."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.bipedal.settings import Name, Terrain
from experiments.reporting.statistics import median
from experiments.runner.runs import Finished
from experiments.vision.methods import METHODS

SOLVED = 200.0  # return; an episode that reaches the far end is worth about 300
STYLES = {name: (method.label, method.colour) for name, method in METHODS.items()}  # label and colour
STYLES["adam-sb3"] = ("Adam, Stable-Baselines3", "C6")
STYLES["fop-paper-1e-5"], STYLES["fop-5e-4"] = ("FOP, printed rule at 1e-5", "C3"), ("FOP at 5e-4", "C9")

Results = Mapping[Terrain, Mapping[Name, Sequence[Finished]]]


def draw(out: Path, results: Results) -> None:
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    for axes, (terrain, by_method) in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True
    ):
        for name, runs in by_method.items():
            curve(axes, name, runs)
        axes.axhline(SOLVED, color="grey", linestyle=":", linewidth=1)
        axes.set_title(f"{terrain} terrain, {len(next(iter(by_method.values())))} seeds")
        axes.set_xlabel("steps of the environments (thousands)")
        axes.set_ylabel("best mean return of successive episodes so far")
        axes.legend(fontsize="small")
    figure.suptitle("BipedalWalker by PPO: median over seeds; shaded, its 95 % bootstrap interval")
    figure.savefig(out / "bipedal.png", dpi=150)


def curve(axes: Axes, name: Name, runs: Sequence[Finished]) -> None:
    """Draw the best score so far, once every run has one; a run that diverged keeps its last.

    Runs that never had one, because they diverged at once or saw too few episodes end, are left out.
    """
    metrics = [m for m in (one.metrics() for one in runs) if m["best"].isfinite().any()]
    label, colour = STYLES[name]
    label += f" ({len(metrics)} of {len(runs)} runs)" if len(metrics) < len(runs) else ""
    if not metrics:
        axes.plot([], [], label=label, color=colour)
        return
    steps = max((m["steps"] for m in metrics), key=len)
    kept = [torch.cat([m["best"], m["best"][-1:].expand(len(steps) - len(m["best"]))]) for m in metrics]
    best = torch.stack(kept)
    there = best.isfinite().all(0)
    found, at = median(best[:, there]), (steps[there] / 1000).tolist()
    axes.plot(at, found.middle.tolist(), label=label, color=colour)
    axes.fill_between(at, found.low.tolist(), found.high.tolist(), color=colour, alpha=0.15, linewidth=0)
