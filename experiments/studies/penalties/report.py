"""What a penalty for each weight gains: tables, figures for the summary, and pictures of the penalties."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from experiments.reporting import statistics
from experiments.reporting.plots import band
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.studies.penalties.regression import Learned
from metafop.tensorboard import Logger

LABELS = {
    "single": "best single penalty of the grid",
    "single_learned": "single penalty, learned",
    "each": "a penalty for each weight, learned",
    "more_digits": "single penalty, trained on all digits of the others",
}
SIDE = 28  # pixels


class Fit(NamedTuple):
    """The penalties a regression was trained with, its cross entropy and its accuracy in % on test digits."""

    l2: Tensor
    loss: float
    accuracy: float


class Outcome(NamedTuple):
    """What came of one split: a fit for each way to penalize, and how the penalties of all were learned."""

    fits: dict[str, Fit]
    learned: Learned


def report(out: Path, outcomes: Sequence[Outcome]) -> Summary:
    """Show the test loss and accuracy of every split, and compare split by split."""
    losses = {name: torch.tensor([o.fits[name].loss for o in outcomes]).double() for name in LABELS}
    accuracies = {name: torch.tensor([o.fits[name].accuracy for o in outcomes]).double() for name in LABELS}
    rows = []
    for i, outcome in enumerate(outcomes):
        cells = [f"{losses[name][i]:.4f} ({accuracies[name][i]:.2f} %)" for name in LABELS]
        singles = [f"{outcome.fits[name].l2:.2g}" for name in ("single", "single_learned")]
        rows.append([f"{i + 1}", *cells, *singles, f"{outcome.learned.best}"])
    columns = ["split", *LABELS.values(), "single", "single, learned", "step of learning"]
    show_table(out, "Test loss (accuracy); single penalties; the step at which was stopped", columns, rows)

    figures: Summary = {"penalties_splits": len(outcomes)}
    rows = []
    for name, label in LABELS.items():
        figures |= {
            f"{name}_loss": losses[name].mean().item(),
            f"{name}_accuracy": accuracies[name].mean().item(),
        }
        rows.append([label, f"{losses[name].mean():.4f}", f"{accuracies[name].mean():.2f} %"])
    show_table(out, "Test digits, mean over splits", ["", "loss", "accuracy"], rows)
    return figures | compared(losses, accuracies)


def compared(losses: dict[str, Tensor], accuracies: dict[str, Tensor]) -> Summary:
    """Compare a penalty for each weight with the better of the two single ones, split by split."""
    single = torch.minimum(losses["single"], losses["single_learned"])
    most = torch.maximum(accuracies["single"], accuracies["single_learned"])
    gain, points = single - losses["each"], accuracies["each"] - most
    loss_interval, points_interval = statistics.interval(gain), statistics.interval(points)
    return {
        "penalties_splits_ahead": int((gain > 0).sum()),
        "penalties_splits_ahead_in_accuracy": int((points > 0).sum()),
        "loss_gain": loss_interval.mean,
        "loss_gain_low": loss_interval.low,
        "loss_gain_high": loss_interval.high,
        "accuracy_gain": points_interval.mean,
        "accuracy_gain_low": points_interval.low,
        "accuracy_gain_high": points_interval.high,
        "single_learned_minus_single_loss": (losses["single_learned"] - losses["single"]).mean().item(),
    }


def log(logger: Logger, outcomes: Sequence[Outcome]) -> None:
    """Write the losses at every step of learning."""
    for i, outcome in enumerate(outcomes):
        learned = outcome.learned
        for step, (validation, held) in enumerate(zip(learned.validation, learned.held, strict=True)):
            logger.info(step, {f"validation/split {i + 1}": validation, f"held/split {i + 1}": held})


def draw(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Ten images of the penalties of the first split, one for each class; and the losses while learning."""
    figure = Figure(figsize=(13, 7.6), layout="constrained")
    places = figure.add_gridspec(2, 1, height_ratios=(1.7, 1))
    above, below = figure.add_subfigure(places[0]), figure.add_subfigure(places[1])
    logs = outcomes[0].fits["each"].l2.log10().T.view(-1, SIDE, SIDE)
    single = outcomes[0].fits["single"].l2.log10().item()
    reach = max((logs - single).abs().quantile(0.98).item(), 1e-3)
    colours = ScalarMappable(Normalize(single - reach, single + reach), "RdBu_r")
    panels = above.subplots(2, 5)
    for digit, (axes, image) in enumerate(zip(panels.flat, logs, strict=True)):
        axes.imshow(image.numpy(), cmap=colours.cmap, norm=colours.norm)
        axes.set_title(f"weights of class {digit}", fontsize="medium")
        axes.set_axis_off()
    above.suptitle(f"{logs.numel():,} learned penalties of the first split, one for each weight")
    above.colorbar(colours, ax=panels, label="log₁₀ penalty (white: the best single one)")
    draw_losses(below.subplots(), outcomes)
    figure.savefig(out / "penalties.png", dpi=100)


def draw_losses(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    validation, held = (
        torch.stack([getattr(o.learned, name) for o in outcomes]) for name in ("validation", "held")
    )
    steps = range(validation.shape[1])
    band(axes, steps, validation, "validation: learned from", "#0072B2")
    band(axes, steps, held, "validation, held: chosen by", "#E69F00")
    axes.plot(
        [outcome.learned.best for outcome in outcomes],
        [outcome.learned.held[outcome.learned.best].item() for outcome in outcomes],
        "k.",
        label="stopped here",
    )
    axes.set_title("Learning penalties, from the best single one: mean over splits; shaded, their range")
    axes.set_xlabel("step of learning")
    axes.set_ylabel("loss after training")
    axes.legend()
