"""The picture of attribution: predictions against retraining, and the digits that mattered most."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments.studies.attribution.config import Config
from experiments.studies.attribution.influences import METHODS
from experiments.studies.attribution.report import over_seeds
from experiments.studies.attribution.runs import OfSeed

SHOWN, MOST = 4, 5  # unseen digits, and training digits of either sign for each
LINES = {"adjoint": "o-", "one_step": "s--"}


def draw(config: Config, found: Sequence[OfSeed]) -> Figure:
    figure = Figure(figsize=(14, 9), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(5, 4))
    plots, digits = parts
    left, right = plots.subplots(1, 2)
    scatter(left, config, found[0])
    correlations(right, config, found)
    for row, axes in enumerate(digits.subplots(SHOWN, 1 + 2 * MOST, squeeze=False)):
        mattering(axes, found[0], row)
    digits.suptitle(
        "Unseen digits (left), and the training digits that lowered their loss most (blue) or raised it (red)"
    )
    return figure


def scatter(axes: Axes, config: Config, seed: OfSeed) -> None:
    """Draw each subset of the middle share, for the unseen digit whose correlation is the median."""
    share = len(config.dropped) // 2
    own = seed.correlations("adjoint")[share]
    digit = int(own.argsort()[len(own) // 2])
    x, y = (changes[share, :, digit].tolist() for changes in (seed.predicted["adjoint"], seed.changes))
    axes.plot(x, y, "o", color="#0072B2", markersize=4)
    ends = [min(x + y), max(x + y)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(
        xlabel="predicted change of the loss",
        ylabel="change after training again",
        title=f"One unseen digit, {config.dropped[share]:.0%} dropped, {config.subsets} times: "
        f"rank correlation {own[digit]:.3f}",
    )


def correlations(axes: Axes, config: Config, found: Sequence[OfSeed]) -> None:
    shares = [100 * share for share in config.dropped]
    for method, label in METHODS.items():
        means = over_seeds(found, method).mean((0, 2)).tolist()
        axes.plot(shares, means, LINES.get(method, ":"), label=label)
    axes.axhline(0.95, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(shares, [f"{share:g}" for share in shares])
    axes.set(xlabel="training digits dropped, %", ylabel="rank correlation")
    axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.02)
    axes.set_title(f"Mean of {config.unseen} unseen digits and {config.seeds} seeds")
    axes.legend(fontsize="small")


def mattering(row: Sequence[Axes], seed: OfSeed, digit: int) -> None:
    """Draw an unseen digit and the training digits that mattered most to its loss."""
    images, labels, _ = seed.problem.everything
    unseen, own = seed.problem.unseen[0][digit], seed.problem.unseen[1][digit]
    order = seed.influence["adjoint"][
        digit
    ].argsort()  # a larger weight lowers the loss most, … raises it most
    picture(row[0], unseen, int(own), "black")
    for axes, place in zip(row[1:], (*order[:MOST], *order[-MOST:].flip(0)), strict=True):
        helps = seed.influence["adjoint"][digit, place] < 0
        picture(axes, images[place], int(labels[place]), "#0072B2" if helps else "#D55E00")


def picture(axes: Axes, image: Tensor, label: int, colour: str) -> None:
    axes.imshow(image.view(28, 28).tolist(), cmap="Greys")
    axes.set_title(str(label), fontsize="small", color=colour)
    axes.set_xticks([])
    axes.set_yticks([])
    for edge in axes.spines.values():
        edge.set(color=colour, linewidth=2)
