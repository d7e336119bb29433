"""The tables and the picture of distillation."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from experiments.measuring.timing import ratio
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.studies.distillation.config import Config
from experiments.studies.distillation.learning import SETTINGS, Learned
from experiments.studies.distillation.problem import CLASSES

# As they report them: the former after three steps in all, the latter over 200 starts.
REPORTED = [
    ["Wang et al., LeNet, 10 images", "93.8", "–"],
    ["Wang et al., LeNet, 100 images", "–", "79.5 ± 8.1"],
]
COLOURS = {"mean": "black", "fixed": "#0072b2", "random": "#d55e00"}


def accuracies(config: Config, known: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> Summary:
    """Show the accuracy on test digits of each setting, from the known start and from new ones."""
    rows, figures = [], {}
    for name, setting in SETTINGS.items():
        mean, deviation = fresh[name].mean().item(), fresh[name].std().item()
        figures |= {
            f"{name}_known": round(known[name].item(), 2),
            f"{name}_fresh": round(mean, 2),
            f"{name}_fresh_deviation": round(deviation, 2),
            f"{name}_fresh_worst": round(fresh[name].min().item(), 2),
        }
        rows.append([setting.label, f"{known[name].item():.2f}", f"{mean:.2f} ± {deviation:.2f}"])
    show_table(
        config.out,
        f"Accuracy on {config.test:,} test digits in percent, after {config.steps} steps on ten images: from "
        f"the known start, and mean and standard deviation over {config.fresh} new ones; below, as reported",
        ["images", "known start", "new starts"],
        rows + REPORTED,
    )
    return figures


def times(config: Config, seconds: Mapping[str, list[float]]) -> Summary:
    """Show what a meta step takes by each estimator."""
    figures: Summary = {f"{name}_ms": round(1e3 * median(took), 1) for name, took in seconds.items()}
    over = {name: ratio(took, seconds["compiled"]) for name, took in seconds.items()}
    show_table(
        config.out,
        f"A meta step through {config.steps} steps, with the loss on {config.batch:,} digits",
        ["estimator", "ms", "over compiled"],
        [[name, f"{figures[f'{name}_ms']:.0f}", f"{over[name]:.2f}"] for name in seconds],
    )
    return figures | {f"{name}_time_vs_compiled": value for name, value in over.items()}


def draw(config: Config, learned: Mapping[str, Learned]) -> None:
    """Draw the ten images of each setting, the learned rates, and the accuracy while they are learned."""
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    parts: Any = figure.subfigures(len(learned) + 1, 1, height_ratios=[*len(learned) * [1], 2])
    for part, (name, found) in zip(parts, learned.items(), strict=False):
        draw_images(part, found.meta.loss["images"], SETTINGS[name].label)
    curve, rates = parts[-1].subplots(1, 2)
    for name, found in learned.items():
        style = {"color": COLOURS[name], "label": SETTINGS[name].label}
        curve.plot(list(found.accuracy), list(found.accuracy.values()), **style)
        rates.plot(range(1, config.steps + 1), found.meta.hyper.lr.tolist(), "o-", markersize=3, **style)
    curve.set_title("accuracy on validation digits (%)", fontsize=10)
    curve.set_xlabel("meta steps")
    curve.legend(fontsize="small")
    rates.set_title("learned learning rates", fontsize=10)
    rates.set_xlabel("step of training")
    rates.set_yscale("log")
    figure.savefig(config.out / "distillation.png", dpi=130)


def draw_images(part: SubFigure, images: Tensor, label: str) -> None:
    """Draw the images in a row, in one scale, which a hundredth of the pixels exceed."""
    part.suptitle(f"images: {label}", fontsize=10)
    largest = images.abs().flatten().quantile(0.99).item()
    for each, axes in enumerate(part.subplots(1, CLASSES)):
        axes.imshow(images[each, 0].tolist(), cmap="gray", vmin=-largest, vmax=largest)
        axes.set_title(str(each), fontsize=9)
        axes.set_axis_off()
