"""The tables and figures of attribution."""

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.studies.attribution.config import Config
from experiments.studies.attribution.influences import METHODS
from experiments.studies.attribution.runs import OfRate, OfSeed
from metafop.tensorboard import Logger


def by_method(config: Config, found: Sequence[OfSeed]) -> Summary:
    """Show the mean rank correlation of each method by how many digits were dropped."""
    figures: Summary = {}
    rows = []
    for method, label in METHODS.items():
        means = over_seeds(found, method).mean((0, 2)).tolist()
        figures |= {f"{method}_{share:g}": mean for share, mean in zip(config.dropped, means, strict=True)}
        rows.append([label, *(f"{mean:.3f}" for mean in means)])
    title = (
        f"Rank correlation of the predicted and the true loss over {config.subsets} subsets, mean of "
        f"{config.unseen} unseen digits and {config.seeds} seeds, by the share of training digits dropped"
    )
    show_table(config.out, title, ["", *(f"{share:.0%}" for share in config.dropped)], rows)
    return figures


def adjoint(config: Config, found: Sequence[OfSeed]) -> Summary:
    """Show more of the adjoint's correlations; return them, the accuracy and the times."""
    each = over_seeds(found, "adjoint")
    of_mean = torch.stack([seed.correlations_of_mean("adjoint") for seed in found])
    columns = {
        "mean": each.mean((0, 2)),
        "worst_seed": each.mean(2).amin(0),
        "worst_digit": each.amin((0, 2)),
        "of_mean_loss": of_mean.mean(0),
        "of_mean_loss_worst_seed": of_mean.amin(0),
        "slope": torch.stack([seed.slopes("adjoint") for seed in found]).mean(0),
    }
    rows, figures = [], Summary()
    for i, share in enumerate(config.dropped):
        figures |= {f"adjoint_{share:g}_{name}": x[i].item() for name, x in columns.items() if name != "mean"}
        rows.append([f"{share:.0%}", *(f"{x[i]:.3f}" for x in columns.values())])
    title = "adjoint: rank correlations of each digit's loss and of the mean loss, and sizes of changes"
    header = [
        "dropped",
        "mean",
        "worst seed",
        "worst digit",
        "of the mean loss",
        "worst seed",
        "true / predicted",
    ]
    show_table(config.out, title, header, rows)
    figures["accuracy"] = sum(seed.accuracy for seed in found) / len(found)
    for what in found[0].seconds:
        figures[f"{what}_seconds"] = sum(seed.seconds[what] for seed in found) / len(found)
    return figures


def by_rate(config: Config, rates: Sequence[OfRate]) -> Summary:
    """Show where the prediction fails: at learning rates at which training is not smooth in the weights."""
    rows, figures = [], Summary()
    for rate in rates:
        correlation = rate.correlations.mean().item()
        figures |= {
            f"lr_{rate.lr:g}_accuracy": rate.accuracy,
            f"lr_{rate.lr:g}_metasmoothness": rate.metasmoothness,
            f"lr_{rate.lr:g}_correlation": correlation,
        }
        rows.append(
            [f"{rate.lr:g}", f"{rate.accuracy:.2f}", f"{rate.metasmoothness:.3f}", f"{correlation:.3f}"]
        )
    title = f"adjoint, {config.dropped_by_lr:.0%} dropped, by learning rate, seed {config.seed}"
    columns = ["learning rate", "test accuracy", "metasmoothness", "rank correlation"]
    show_table(config.out, title, columns, rows)
    return figures


def over_seeds(found: Sequence[OfSeed], method: str) -> Tensor:
    """Return the correlations of a method, (seeds, shares, unseen)."""
    return torch.stack([seed.correlations(method) for seed in found])


def log(config: Config, found: Sequence[OfSeed], logger: Logger) -> None:
    """Write the mean correlations to TensorBoard, by how many digits were dropped."""
    means = {method: over_seeds(found, method).mean((0, 2)) for method in METHODS}
    for i, share in enumerate(config.dropped):
        correlations = {f"correlation/{method}": mean[i] for method, mean in means.items()}
        logger.info(round(share * config.examples), correlations)
