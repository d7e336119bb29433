"""The tables and figures of cleaning, over seeds."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.studies.cleaning.agreement import Agreement
from experiments.studies.cleaning.config import Config, Net
from experiments.studies.cleaning.runs import MARKS, OfSeed
from metafop.tensorboard import Logger

LABELS = {"linear": "linear classifier", "mlp": "MLP"}
SETS = {
    "all": "all, as they are labelled",
    "learned": "all, by the weights learned online",
    "right": "those labelled right (an oracle)",
    "validation": "the validation digits alone",
    "learned_and_validation": "these, and all by the weights learned online",
    "right_and_validation": "these, and those labelled right (an oracle)",
}
Found = Mapping[str, Sequence[OfSeed]]  # by network; one for each seed


def report(config: Config, found: Found) -> Summary:
    figures: Summary = {}
    for name, seeds in found.items():
        net: Net = getattr(config, name)
        figures |= methods(config, name, net, seeds) | trained_anew(config, name, net, seeds)
    return figures


def methods(config: Config, name: str, net: Net, seeds: Sequence[OfSeed]) -> Summary:
    """Show how well each method did, and return the means and the worst of the seeds."""
    figures: Summary = {}
    rows = []
    for method in seeds[0].learned:
        runs = [seed.learned[method] for seed in seeds]
        columns = {
            field: torch.tensor([float(getattr(run, field)) for run in runs], dtype=torch.float64)
            for field in ("accuracy", "validation", "f1", "steps", "spent", "seconds")
        }
        accuracy, f1 = columns["accuracy"], columns["f1"]
        alone = torch.tensor([seed.anew["validation"].accuracy for seed in seeds], dtype=torch.float64)
        key = f"{name}_{method}"
        figures |= {f"{key}_{field}": column.mean().item() for field, column in columns.items()}
        figures |= {f"{key}_accuracy_worst": accuracy.min().item(), f"{key}_f1_worst": f1.min().item()}
        figures[f"{key}_above_validation_alone"] = (accuracy - alone).mean().item()
        rows.append(
            [
                method,
                spread(accuracy),
                f"{columns['validation'].mean():.2f}",
                spread(f1, 3),
                *(f"{columns[field].mean():.0f}" for field in ("steps", "spent", "seconds")),
            ]
        )
    title = (
        f"{LABELS[name]}: weights learned at {net.gradients} gradients, "
        f"mean of {config.seeds} seeds (least to most)"
    )
    header = ["", "test accuracy", "validation", "F1 of wrong labels", "steps of the weights", "gradients"]
    show_table(config.out, title, [*header, "CPU seconds"], rows)
    return figures


def trained_anew(config: Config, name: str, net: Net, seeds: Sequence[OfSeed]) -> Summary:
    """Show what the same network makes of each set of digits, trained anew for as many steps."""
    figures: Summary = {}
    rows = []
    for key, label in SETS.items():
        accuracy, stopped = (
            torch.tensor([getattr(seed.anew[key], field) for seed in seeds], dtype=torch.float64)
            for field in ("accuracy", "stopped")
        )
        own = "validation" not in key  # those that are validated by what they were not trained on
        figures[f"{name}_{key}_anew"] = accuracy.mean().item()
        figures[f"{name}_{key}_anew_worst"] = accuracy.min().item()
        figures |= {f"{name}_{key}_anew_stopped": stopped.mean().item()} if own else {}
        rows.append([label, spread(accuracy), spread(stopped) if own else ""])
    gains = torch.tensor(
        [seed.anew["learned_and_validation"].accuracy - seed.anew["validation"].accuracy for seed in seeds]
    )
    figures |= {f"{name}_gain": gains.mean().item(), f"{name}_gain_ahead": int((gains > 0).sum())}
    title = f"{LABELS[name]}, trained anew for {net.steps} steps: test accuracy by what it is trained on"
    show_table(config.out, title, ["", "in the end", "where validation is best"], rows)
    return figures


def agreement(config: Config, seeds: Sequence[Agreement]) -> Summary:
    """Show how the derivative at the end of a run compares with that through all its steps."""
    rows = [
        [
            str(config.seed + i),
            f"{one.cosine:.6f}",
            f"{one.distance:.1e}",
            str(one.iterations),
            f"{one.run:.1f}",
            f"{one.adjoint:.1f}",
            f"{one.implicit:.2f}",
            f"{one.ratio:.3f}",
            f"{one.ratio_with_run:.3f}",
        ]
        for i, one in enumerate(seeds)
    ]
    columns = ["seed", "cosine", "to a minimum", "iterations", "steps, s", "adjoint, s", "implicit, s"]
    title = f"linear classifier, {config.agreed} steps: the derivative in the weights, implicit and adjoint"
    show_table(config.out, title, [*columns, "implicit / adjoint", "with the steps"], rows)
    return {
        "implicit_cosine": min(one.cosine for one in seeds),
        "implicit_time_ratio": max(one.ratio for one in seeds),
        "implicit_time_ratio_with_run": max(one.ratio_with_run for one in seeds),
        "implicit_distance": max(one.distance for one in seeds),
    }


def spread(values: Tensor, digits: int = 2) -> str:
    mean, least, most = (f"{x:.{digits}f}" for x in (values.mean(), values.min(), values.max()))
    return f"{mean} ({least} to {most})"


def over_seeds(seeds: Sequence[OfSeed], method: str, field: str) -> Tensor:
    """Return what was found at each mark, (seeds, marks)."""
    return torch.stack([getattr(seed.learned[method], field) for seed in seeds])


def log(found: Found, logger: Logger) -> None:
    """Write the curves of TensorBoard, by percent of the budget."""
    for mark in range(MARKS + 1):
        info: dict[str, Any] = {}
        for name, seeds in found.items():
            for method in seeds[0].learned:
                for field in ("accuracies", "f1s"):
                    info[f"{field}/{name}/{method}"] = over_seeds(seeds, method, field)[:, mark].mean()
        logger.info(round(100 * mark / MARKS), info)
