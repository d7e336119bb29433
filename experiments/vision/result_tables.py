"""The tables of the paper, ours beside its own, and what pairs of runs tell."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.reporting import statistics
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.runner.runs import Finished
from experiments.vision.methods import METHODS

Results = Mapping[str, Sequence[Finished]]  # by method, in the order of their seeds
Printed = tuple[str, str, str]  # accuracy, additional parameters, additional time in percent


def accuracies(runs: Sequence[Finished], of: str) -> Tensor:
    """Return the accuracy in percent on "test" or "validation" images; NaN of a run that diverged."""
    found = [math.nan if r.result["diverged"] else r.result[f"{of}_accuracy"] for r in runs]
    return 100 * torch.tensor(found, dtype=torch.float64)


def paper_table(
    out: Path,
    results: Results,
    times: Mapping[str, float],
    printed: Mapping[str, Printed],
    of: str,
    ours: str,
) -> Summary:
    """Show accuracy, additional parameters and additional time of each method, and what the paper prints."""
    figures: Summary = {}
    rows = []
    for name, runs in results.items():
        accuracy = spread(accuracies(runs, of))
        parameters, percent = times[f"{name}_parameters"], times[f"{name}_percent"]
        figures |= {
            f"{name}_lr": runs[0].task.method.lr,
            f"{name}_seeds": len(runs),
            f"{name}_diverged": accuracy.diverged,
            f"{name}_accuracy": accuracy.mean,
            f"{name}_accuracy_deviation": accuracy.deviation,
            f"{name}_additional_parameters": parameters,
            f"{name}_additional_time_percent": round(percent, 2),
        }
        mine = (accuracy.shown(1), f"{parameters:,}", f"{percent:.1f}")
        pairs = zip(mine, printed.get(name, "–––"), strict=True)
        cells = [cell for both in pairs for cell in both]
        rows.append([METHODS[name].label, f"{runs[0].task.method.lr:g}", str(len(runs)), *cells])
    show_table(
        out,
        f"The paper's table, ours beside it ({ours}): accuracy on {of} images in percent ± standard "
        "deviation over seeds, numbers that are learned besides the weights, additional time of a step",
        ["method", "lr", "seeds", "accuracy", "paper", "parameters", "paper", "time %", "paper"],
        rows,
    )
    return figures


class Spread(NamedTuple):
    """A mean and a standard deviation, None if there are too few, of runs that did not diverge."""

    mean: float | None
    deviation: float | None
    diverged: int

    def shown(self, digits: int) -> str:
        known = ["–" if x is None else f"{x:.{digits}f}" for x in (self.mean, self.deviation)]
        return " ± ".join(known) + (f" ({self.diverged} diverged)" if self.diverged else "")


def spread(values: Tensor) -> Spread:
    """Return the mean and deviation of those that are finite, and how many are not."""
    finite = values[values.isfinite()]
    mean = round(finite.mean().item(), 3) if len(finite) else None
    deviation = round(finite.std().item(), 3) if len(finite) > 1 else None
    return Spread(mean, deviation, len(values) - len(finite))


def pairs_table(out: Path, results: Results, of: str, epoch: int, drop: float) -> Summary:
    """Show every method's differences from momentum, seed by seed.

    `epoch` is in steps, and `drop` is the epoch after which the learning rate is first divided.
    """
    figures: Summary = {}
    rows = []
    for name in (name for name in results if name != "momentum"):
        for view, (values, better) in views(results[name], results["momentum"], of, epoch, drop).items():
            ratio = view == "steps_ratio"
            found = statistics.geometric(values) if ratio else statistics.interval(values)
            gains = better * (values.log() if ratio else values)
            ahead, p = f"{int((gains > 0).sum())} of {len(values)}", statistics.p_value(gains)
            ends = [None if x is None else round(x, 5) for x in found]
            figures |= zip((f"{name}_{view}{end}" for end in ("", "_low", "_high")), ends, strict=True)
            figures[f"{name}_{view}_ahead"] = ahead
            figures[f"{name}_{view}_p"] = None if p is None else float(f"{p:.2g}")
            if ratio:
                figures[f"{name}_never_there"] = int(values.isnan().sum())
            cells = ["–" if x is None else f"{x:.3f}" if ratio else f"{x:+.3f}" for x in found]
            p_text = "–" if p is None else f"{p:.1g}"
            rows.append([METHODS[name].label, view.replace("_", " "), *cells, p_text, ahead])
    show_table(
        out,
        "Against momentum, pair by pair, with 95 % t-intervals, and p-values that are not adjusted for their "
        "number. Steps ratio: steps until the mean training loss of an epoch is at that of momentum's last "
        "epoch, over the steps after which momentum itself is first there; – if a run never is. Before the "
        "drop: on validation images, after the last whole epoch before the learning rate is divided. Loss in "
        "nats, accuracy in points",
        ["method", "what", "mean", "low", "high", "p", "ahead"],
        rows,
    )
    return figures


def views(
    runs: Sequence[Finished], base: Sequence[Finished], of: str, epoch: int, drop: float
) -> dict[str, tuple[Tensor, int]]:
    """Return how each seed compares with momentum's, and the sign of what is better."""
    by_seed = {r.task.seed: r for r in base}
    others = [by_seed[r.task.seed] for r in runs]
    ratios, differences, before = [], [], []
    for mine, other in zip(runs, others, strict=True):
        metrics, base_metrics = mine.metrics(), other.metrics()
        losses, theirs = metrics["loss"], base_metrics["loss"]
        final = math.nan if other.result["diverged"] else theirs[-epoch:].mean().item()
        ratios.append(statistics.steps_to(losses, final, epoch) / statistics.steps_to(theirs, final, epoch))
        differences.append(math.nan if mine.result["diverged"] else losses[-epoch:].mean().item() - final)
        before.append(
            _validation_accuracy(metrics, int(drop) * epoch)
            - _validation_accuracy(base_metrics, int(drop) * epoch)
        )
    found = {
        "steps_ratio": (torch.tensor(ratios, dtype=torch.float64), -1),
        "final_loss_difference": (torch.tensor(differences, dtype=torch.float64), -1),
        "accuracy_difference": (accuracies(runs, of) - accuracies(others, of), 1),
    }
    known = torch.tensor(before, dtype=torch.float64)
    return found | ({"accuracy_before_the_drop": (known, 1)} if known.isfinite().any() else {})


def _validation_accuracy(metrics: Mapping[str, Tensor], steps: int) -> float:
    """Return the accuracy in percent on validation images after so many steps; NaN if it was not measured."""
    accuracy = metrics["validation_accuracy"]
    return 100 * accuracy[steps - 1].item() if 0 < steps <= len(accuracy) else math.nan
