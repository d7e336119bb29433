"""The tables: returns of each method, steps to them, differences by seed, and eigenvalues of P."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from experiments.paper.bipedal.evaluation import EPISODES, return_on_new_landscapes
from experiments.paper.bipedal.figure import SOLVED, STYLES, Results, draw
from experiments.paper.bipedal.recording import record_episode
from experiments.paper.bipedal.settings import META_RATES, RATES, Name
from experiments.paper.bipedal.training import DIAGNOSTICS_EVERY
from experiments.reporting import statistics
from experiments.reporting.statistics import median
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.runner.runs import Finished

LATE = 0.2  # of the training, its end
BASES: tuple[Name, ...] = ("momentum", "adam")  # that the paper compares FOP with
LAYERS = {"hidden.0": "first", "hidden.2": "second", "mean": "actions", "value": "value"}


def write_report(out: Path, results: Results) -> Summary:
    """Show tables, draw a figure, record episodes; return the figures of the tables."""
    figures = report(out, results) | report_pairs(out, results)
    figures |= report_new_landscapes(out, results) | report_eigenvalues(out, results)
    draw(out, results)
    return figures | record_best(out, results)


def report(out: Path, results: Results) -> Summary:
    """Show the final returns of each method, the steps to them, and how fast it is computed."""
    figures: Summary = {}
    for terrain, by_method in results.items():
        rows = []
        for name, runs in by_method.items():
            best, solved = median(final(runs, "best")), int((final(runs, "best") > SOLVED).sum())
            diverged = sum(one.result["diverged"] for one in runs)
            found = {
                "best": best.middle,
                "best_low": best.low,
                "best_high": best.high,
                "all": mean_score(runs, 1.0).mean(),
                "late": mean_score(runs, LATE).mean(),
                "walked": final(runs, "walked").mean(),
                f"steps_to_{SOLVED:g}": torch.tensor([steps_to(one) for one in runs]).quantile(0.5),
                "walked_per_second": final(runs, "walked_per_second").quantile(0.5),
                "steps_per_second": final(runs, "steps_per_second").quantile(0.5),
            }
            key = f"{terrain}_{name}"
            figures |= {f"{key}_{what}": _known(x.item()) for what, x in found.items()}
            figures |= {f"{key}_solved": solved, f"{key}_diverged": diverged}
            found[f"steps_to_{SOLVED:g}"] /= 1000
            cells = [f"{x:.0f}" if x.isfinite() else "–" for x in found.values()]
            cells += [f"{solved} of {len(runs)}", str(diverged)]
            rows.append([STYLES[name][0], f"{RATES[name]:g}", *cells])
        show_table(
            out,
            f"The {terrain} terrain. A score is the mean return of the last episodes, which successive "
            "policies walked. Best: the highest so far, in the end, median over seeds, with a 95 % bootstrap "
            "interval (of few seeds, their range). All, late: mean of all scores of the training, and of its "
            f"last {LATE:.0%}, mean over seeds. Walked: return of the policy kept at the highest score, in "
            f"{EPISODES} episodes in the end, without noise, mean over seeds. Steps: thousands until a score "
            f"is above {SOLVED:g}, median over seeds; solved: runs in which one is. Walks, learns: steps of "
            "the environments in a second of one core, to walk, and to learn too",
            [
                *("method", "lr", "best", "low", "high", "all", "late", "walked", "steps", "walks", "learns"),
                *("solved", "diverged"),
            ],
            rows,
        )
    return figures


def report_pairs(out: Path, results: Results) -> Summary:
    """Show FOP against momentum and Adam, and our PPO against another, pair by pair."""
    figures: Summary = {}
    rows = []
    pairs: list[tuple[Name, Name]] = [(name, base) for name in META_RATES for base in BASES]
    for terrain, by_method in results.items():
        for name, base in [*pairs, ("adam", "adam-sb3")]:
            if name not in by_method or base not in by_method:
                continue
            ours, theirs = by_method[name], by_method[base]
            gains = {
                "": final(ours, "best") - final(theirs, "best"),
                "_all": mean_score(ours, 1.0) - mean_score(theirs, 1.0),
                "_late": mean_score(ours, LATE) - mean_score(theirs, LATE),
            }
            cells = [compared(gain, f"{terrain}_{name}_over_{base}{what}") for what, gain in gains.items()]
            for found, _ in cells:
                figures |= found
            rows.append([f"{STYLES[name][0]} over {STYLES[base][0]}", terrain, *(text for _, text in cells)])
    if rows:
        show_table(
            out,
            "The best, all and late scores: differences within a seed, their mean, its 95 % t-interval, "
            "Student's p, not adjusted for their number, and seeds ahead",
            ["methods", "terrain", "best", "all", "late"],
            rows,
        )
    return figures


def compared(gain: Tensor, key: str) -> tuple[Summary, str]:
    """Return the mean gain over seeds, its interval, p and how many are ahead, as figures and in words."""
    found, p, finite = statistics.interval(gain), statistics.p_value(gain), gain[gain.isfinite()]
    ends = zip(("", "_low", "_high"), found, strict=True)
    figures: Summary = {f"{key}{end}": None if x is None else round(x, 2) for end, x in ends}
    figures[f"{key}_p"] = None if p is None else float(f"{p:.2g}")
    figures[f"{key}_ahead"] = f"{int((finite > 0).sum())} of {len(finite)}"
    mean, low, high = ("–" if x is None else f"{x:+.1f}" for x in found)
    p_text = "–" if p is None else f"{p:.2g}"
    return figures, f"{mean} ({low} to {high}; p {p_text}; {figures[f'{key}_ahead']})"


def report_new_landscapes(out: Path, results: Results) -> Summary:
    """Show the return on other landscapes of what was learned on one."""
    figures: Summary = {}
    rows = []
    for name, runs in results["standard"].items():
        found = torch.tensor([return_on_new_landscapes(one) for one in runs])
        solved, key = int((found > SOLVED).sum()), f"elsewhere_{name}"
        figures |= {key: round(found.mean().item(), 2), f"{key}_solved": solved}
        by_seed = ", ".join(f"{x:.0f}" for x in found.tolist())
        rows.append([STYLES[name][0], f"{found.mean():.0f}", by_seed, f"{solved} of {len(found)}"])
    show_table(
        out,
        "Elsewhere: BipedalWalker-v3 as gymnasium makes it, a new landscape for every episode of at most "
        "1600 steps. Return of the policy kept by each run on the standard terrain, mean over "
        f"{EPISODES} episodes without noise; over seeds, and seed by seed; runs above {SOLVED:g}",
        ["method", "mean", "by seed", "solved"],
        rows,
    )
    return figures


def report_eigenvalues(out: Path, results: Results) -> Summary:
    """Show the smallest and the largest eigenvalue of P, layer by layer."""
    figures: Summary = {}
    rows = []
    for terrain, by_method in results.items():
        for name, runs in by_method.items():
            if name not in META_RATES:
                continue
            found = torch.stack([extremes(one) for one in runs]).quantile(0.5, 0)
            cells = []
            for layer, (low, high) in zip(LAYERS, found.tolist(), strict=True):
                key = f"{terrain}_{name}"
                figures |= {f"{key}_smallest_{layer}": _digits(low), f"{key}_largest_{layer}": _digits(high)}
                cells.append("–" if math.isnan(low) else f"{low:.1g} to {high:.3g}")
            rows.append([STYLES[name][0], terrain, f"{META_RATES[name]:g}", *cells])
    if rows:
        show_table(
            out,
            f"The smallest and the largest eigenvalue of P when last looked at (every {DIAGNOSTICS_EVERY} "
            "improvements of a policy), by layer, medians over seeds; P starts as the identity",
            ["method", "terrain", "meta lr", *LAYERS.values()],
            rows,
        )
    return figures


def extremes(one: Finished) -> Tensor:
    """Return the smallest and the largest eigenvalue of P, (layers, 2), as last written for TensorBoard.

    They are NaN where none was written.
    """
    events = EventAccumulator(str(one.folder), purge_orphaned_data=False)
    events.Reload()
    seen, found = events.Tags()["scalars"], torch.full((len(LAYERS), 2), torch.nan)
    for i, layer in enumerate(LAYERS):
        for j, end in enumerate(("min", "max")):
            tag = f"eigenvalue_{end}/{layer}.weight"
            if tag in seen:
                found[i, j] = max(events.Scalars(tag), key=lambda event: (event.step, event.wall_time)).value
    return found


def final(runs: Sequence[Finished], what: str) -> Tensor:
    """Return a figure of each run, NaN if it has none."""
    values = [one.result.get(what) for one in runs]
    return torch.tensor([torch.nan if x is None else x for x in values], dtype=torch.float64)


def mean_score(runs: Sequence[Finished], part: float) -> Tensor:
    """Return the mean score of each run in the last part of its training; NaN if it did not get there."""
    scores = [one.metrics()["score"] for one in runs]
    late = torch.stack([score[int((1 - part) * len(score)) :].nanmean() for score in scores])
    return late.where(final(runs, "diverged") == 0, torch.nan)


def steps_to(one: Finished) -> float:
    """Return after how many steps the best policy so far is above what counts as solved; inf if never."""
    metrics = one.metrics()
    there = metrics["best"] > SOLVED
    return metrics["steps"][there][0].item() if there.any() else torch.inf


def _known(value: float) -> float | None:
    return round(value, 2) if abs(value) < torch.inf else None


def _digits(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.3g}")


def record_best(out: Path, results: Results) -> Summary:
    """Write a moving picture for each terrain, of the policy of ours with the best return in the end."""
    figures: Summary = {}
    for terrain, by_method in results.items():
        ours = [one for name, runs in by_method.items() for one in runs if name != "adam-sb3"]
        if ours:
            best = max(ours, key=lambda one: one.result["walked"])
            record_episode(out / f"{terrain}.gif", best)
            figures[f"{terrain}_film"] = f"{STYLES[best.task.method][0]}, seed {best.task.seed}"
    return figures
