"""The picture of maml: sinusoids as networks adapt to them, and the loss while the start is learned."""

from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments.studies.maml.cost import Cost
from experiments.studies.maml.learning import RECIPES, Adapted, Learned, Unseen

SHOWN = {"joint": "one network for all tasks", "maml1": "MAML, learned through 1 step"}
STEPS = {0: "#bbbbbb", 1: "#56b4e9", 5: "#0072b2", 10: "#003a5d"}
TASKS = 3  # the first of the unseen ones
COLOURS = {"joint": "black", "maml1": "#0072b2", "maml5": "#009e73", "rates1": "#d55e00"}


def draw(
    path: Path,
    learned: Mapping[str, Learned],
    unseen: Unseen,
    adapted: Mapping[str, Adapted],
    costs: Mapping[int, Cost],
) -> None:
    figure = Figure(figsize=(13, 10), layout="constrained")
    panels = figure.subplots(3, 3)
    for row, (name, title) in zip(panels, SHOWN.items(), strict=False):
        for task, axes in enumerate(row[:TASKS]):
            draw_task(axes, unseen, adapted[name], task)
            axes.set_title(f"{title}: unseen task {task + 1}", fontsize=10)
        row[0].legend(fontsize="small")
    meta_curve(panels[2, 0], learned)
    unseen_errors(panels[2, 1], adapted)
    beside_higher(panels[2, 2], costs)
    figure.savefig(path, dpi=130)


def draw_task(axes: Axes, unseen: Unseen, adapted: Adapted, task: int) -> None:
    x, y = (part[task, :, 0].tolist() for part in unseen.whole)
    axes.plot(x, y, color="#d55e00", linewidth=1, label="the sinusoid")
    for step, colour in STEPS.items():
        if step < len(adapted.curves):
            label = f"after {step} step{'s' * (step != 1)}"
            axes.plot(x, adapted.curves[step, task].tolist(), color=colour, label=label)
    axes.plot(*(part[task, :, 0].tolist() for part in unseen.seen), "^", color="#d55e00", label="ten points")


def meta_curve(axes: Axes, learned: Mapping[str, Learned]) -> None:
    for name, found in learned.items():
        window = max(len(found.losses) // 100, 1)
        axes.plot(*smooth(found.losses, window), color=COLOURS[name], label=RECIPES[name].label)
    axes.set_title("loss while learning, after the steps", fontsize=10)
    axes.set_xlabel("meta steps")
    axes.set_yscale("log")
    axes.legend(fontsize="small")


def smooth(values: Tensor, window: int) -> tuple[list[float], list[float]]:
    """Return the means of windows, and where each has its middle."""
    means = values[: len(values) // window * window].view(-1, window).mean(1)
    return (window * (torch.arange(len(means)) + 0.5)).tolist(), means.tolist()


def unseen_errors(axes: Axes, adapted: Mapping[str, Adapted]) -> None:
    for name, found in adapted.items():
        axes.plot(found.errors.mean(1).tolist(), "o-", color=COLOURS[name], label=RECIPES[name].label)
    axes.set_title("error on unseen tasks", fontsize=10)
    axes.set_xlabel("steps on ten points of the task")
    axes.set_yscale("log")


def beside_higher(axes: Axes, costs: Mapping[int, Cost]) -> None:
    """Draw the losses of the first meta steps, by us as a line and by higher as points."""
    for (steps, cost), colour in zip(costs.items(), ("#0072b2", "#009e73"), strict=True):
        label = f"{steps} step{'s' * (steps > 1)}"
        axes.plot(cost.losses["metafop, compiled"].tolist(), color=colour, label=f"metafop, {label}")
        axes.plot(cost.losses["higher"].tolist(), ".", color=colour, label=f"higher, {label}")
    axes.set_title("the first meta steps, by us and by higher", fontsize=10)
    axes.set_xlabel("meta steps")
    axes.legend(fontsize="small")
