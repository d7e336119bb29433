"""The tables of the paper, ours beside its own, and what pairs of runs tell."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments import paired, run
from experiments.methods import LOOKS
from experiments.runs import Finished

Results = Mapping[str, Sequence[Finished]]  # by method, in the order of their seeds
Printed = tuple[str, str, str]  # accuracy, additional parameters, additional time in percent


def accuracies(runs: Sequence[Finished], of: str) -> Tensor:
    """Return the accuracy in percent on "test" or "validation" images, of each run."""
    return 100 * torch.tensor([r.result[f"{of}_accuracy"] for r in runs], dtype=torch.float64)


def paper_table(
    out: Path, results: Results, times: Mapping[str, float], printed: Mapping[str, Printed], of: str
) -> dict[str, run.Figure]:
    """Show accuracy, additional parameters and additional time of each method, and what the paper prints."""
    figures: dict[str, run.Figure] = {}
    rows = []
    for name, runs in results.items():
        accuracy = accuracies(runs, of)
        spread = accuracy.std().item() if len(runs) > 1 else 0.0
        parameters, percent = times[f"{name}_parameters"], times[f"{name}_percent"]
        figures |= {
            f"{name}_lr": runs[0].task.method.lr,
            f"{name}_accuracy": round(accuracy.mean().item(), 3),
            f"{name}_accuracy_deviation": round(spread, 3),
            f"{name}_additional_parameters": parameters,
            f"{name}_additional_time_percent": round(percent, 2),
        }
        ours = [f"{accuracy.mean():.1f} ± {spread:.1f}", f"{parameters:,}", f"{percent:.1f}"]
        pairs = [cell for both in zip(ours, printed.get(name, "–––"), strict=True) for cell in both]
        rows.append([LOOKS[name].label, f"{runs[0].task.method.lr:g}", str(len(runs)), *pairs])
    run.show(
        out,
        f"The paper's table, ours beside it: accuracy on {of} images in percent ± standard deviation over "
        "seeds, numbers that are learned besides the weights, additional time of a step",
        ["method", "lr", "seeds", "accuracy", "paper", "parameters", "paper", "time %", "paper"],
        rows,
    )
    return figures


def pairs_table(out: Path, results: Results, of: str) -> dict[str, run.Figure]:
    """Show every method's differences from momentum, seed by seed."""
    figures: dict[str, run.Figure] = {}
    rows = []
    for name, runs in results.items():
        for view, (values, better) in views(runs, results["momentum"], of).items():
            ratio = view == "steps_ratio"
            if name == "momentum" and not ratio:
                continue
            found = paired.geometric(values) if ratio else paired.interval(values)
            gains = better * (values.log() if ratio else values)
            ahead, p = f"{int((gains > 0).sum())} of {len(values)}", paired.p_value(gains)
            ends = [None if x is None else round(x, 5) for x in found]
            figures |= zip((f"{name}_{view}{end}" for end in ("", "_low", "_high")), ends, strict=True)
            figures |= {
                f"{name}_{view}_ahead": ahead,
                f"{name}_{view}_p": None if p is None else float(f"{p:.2g}"),
            }
            if ratio:
                figures[f"{name}_never_there"] = int(values.isnan().sum())
            cells = ["–" if x is None else f"{x:.3f}" if ratio else f"{x:+.3f}" for x in found]
            said = "–" if p is None else f"{p:.1g}"
            rows.append([LOOKS[name].label, view.replace("_", " "), *cells, said, ahead])
    run.show(
        out,
        "Against momentum, pair by pair, with 95 % t-intervals and p-values over seeds. Steps ratio: steps "
        "until the mean training loss of an epoch is at that of momentum's last epoch, over all steps; – if "
        "a run never is; momentum's own tells how often it is there before. Loss in nats, accuracy in points",
        ["method", "what", "mean", "low", "high", "p", "ahead"],
        rows,
    )
    return figures


def views(runs: Sequence[Finished], base: Sequence[Finished], of: str) -> dict[str, tuple[Tensor, int]]:
    """Return how each seed compares with momentum's, and the sign of what is better."""
    by_seed = {r.task.seed: r for r in base}
    others = [by_seed[r.task.seed] for r in runs]
    ratios, differences = [], []
    for mine, other in zip(runs, others, strict=True):
        losses, target = mine.metrics()["loss"], other.metrics()["loss"]
        epoch = len(target) // mine.task.epochs
        final = target[-epoch:].mean().item()
        ratios.append(paired.steps_to(losses, final, epoch) / len(target))
        differences.append(losses[-epoch:].mean().item() - final)
    return {
        "steps_ratio": (torch.tensor(ratios, dtype=torch.float64), -1),
        "final_loss_difference": (torch.tensor(differences, dtype=torch.float64), -1),
        "accuracy_difference": (accuracies(runs, of) - accuracies(others, of), 1),
    }
