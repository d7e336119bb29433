"""What the runs of a biped tell: how well it walks, how soon, who is ahead, and what FOP has learned."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from experiments import paired, run
from experiments.medians import median
from experiments.methods import LOOKS
from experiments.runs import Finished
from experiments.strolls import EPISODES, film, return_elsewhere
from experiments.walk import META_RATES, RATES, Name, Terrain
from experiments.walking import LOOKED_AT_EVERY

SOLVED = 200.0  # return; a walk to the far end is worth about 300
LATE = 0.2  # of the training, its end
BASES: tuple[Name, ...] = ("momentum", "adam")  # that FOP is said to be ahead of
LAYERS = {"hidden.0": "first", "hidden.2": "second", "mean": "actions", "value": "value"}
SHOWN = {name: (look.label, look.colour) for name, look in LOOKS.items()}  # label and colour
SHOWN["adam-sb3"] = ("Adam, Stable-Baselines3", "C6")
SHOWN["fop-paper-1e-5"], SHOWN["fop-5e-4"] = ("FOP, printed rule at 1e-5", "C3"), ("FOP at 5e-4", "C9")

Results = Mapping[Terrain, Mapping[Name, Sequence[Finished]]]


def tell(out: Path, results: Results) -> dict[str, run.Figure]:
    """Show tables, draw a figure, make films; return the figures of the tables."""
    figures = report(out, results) | report_pairs(out, results)
    figures |= report_elsewhere(out, results) | report_growth(out, results)
    draw(out, results)
    return figures | film_best(out, results)


def report(out: Path, results: Results) -> dict[str, run.Figure]:
    """Show how well each method walks in the end, how soon it walks, and how fast it is computed."""
    figures: dict[str, run.Figure] = {}
    for terrain, by_method in results.items():
        rows = []
        for name, runs in by_method.items():
            best, solved = median(ended(runs, "best")), int((ended(runs, "best") > SOLVED).sum())
            diverged = sum(one.result["diverged"] for one in runs)
            found = {
                "best": best.middle,
                "best_low": best.low,
                "best_high": best.high,
                "all": mean_score(runs, 1.0).mean(),
                "late": mean_score(runs, LATE).mean(),
                "walked": ended(runs, "walked").mean(),
                f"steps_to_{SOLVED:g}": torch.tensor([steps_to(one) for one in runs]).quantile(0.5),
                "walked_per_second": ended(runs, "walked_per_second").quantile(0.5),
                "steps_per_second": ended(runs, "steps_per_second").quantile(0.5),
            }
            key = f"{terrain}_{name}"
            figures |= {f"{key}_{what}": _known(x.item()) for what, x in found.items()}
            figures |= {f"{key}_solved": solved, f"{key}_diverged": diverged}
            found[f"steps_to_{SOLVED:g}"] /= 1000
            cells = [f"{x:.0f}" if x.isfinite() else "–" for x in found.values()]
            cells += [f"{solved} of {len(runs)}", str(diverged)]
            rows.append([SHOWN[name][0], f"{RATES[name]:g}", *cells])
        run.show(
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


def report_pairs(out: Path, results: Results) -> dict[str, run.Figure]:
    """Show FOP against what it is said to be ahead of, and our PPO against another, pair by pair."""
    figures: dict[str, run.Figure] = {}
    rows = []
    pairs: list[tuple[Name, Name]] = [(name, base) for name in META_RATES for base in BASES]
    for terrain, by_method in results.items():
        for name, base in [*pairs, ("adam", "adam-sb3")]:
            if name not in by_method or base not in by_method:
                continue
            ours, theirs = by_method[name], by_method[base]
            gains = {
                "": ended(ours, "best") - ended(theirs, "best"),
                "_all": mean_score(ours, 1.0) - mean_score(theirs, 1.0),
                "_late": mean_score(ours, LATE) - mean_score(theirs, LATE),
            }
            cells = [compared(gain, f"{terrain}_{name}_over_{base}{what}") for what, gain in gains.items()]
            for found, _ in cells:
                figures |= found
            rows.append([f"{SHOWN[name][0]} over {SHOWN[base][0]}", terrain, *(said for _, said in cells)])
    if rows:
        run.show(
            out,
            "The best, all and late scores: differences within a seed, their mean, its 95 % t-interval, "
            "Student's p, not adjusted for their number, and seeds ahead",
            ["methods", "terrain", "best", "all", "late"],
            rows,
        )
    return figures


def compared(gain: Tensor, key: str) -> tuple[dict[str, run.Figure], str]:
    """Return the mean gain over seeds, its interval, p and how many are ahead, as figures and in words."""
    found, p, finite = paired.interval(gain), paired.p_value(gain), gain[gain.isfinite()]
    ends = zip(("", "_low", "_high"), found, strict=True)
    figures: dict[str, run.Figure] = {f"{key}{end}": None if x is None else round(x, 2) for end, x in ends}
    figures[f"{key}_p"] = None if p is None else float(f"{p:.2g}")
    figures[f"{key}_ahead"] = f"{int((finite > 0).sum())} of {len(finite)}"
    mean, low, high = ("–" if x is None else f"{x:+.1f}" for x in found)
    p_said = "–" if p is None else f"{p:.2g}"
    return figures, f"{mean} ({low} to {high}; p {p_said}; {figures[f'{key}_ahead']})"


def report_elsewhere(out: Path, results: Results) -> dict[str, run.Figure]:
    """Show how well what was learned on one landscape walks on others."""
    figures: dict[str, run.Figure] = {}
    rows = []
    for name, runs in results["standard"].items():
        found = torch.tensor([return_elsewhere(one) for one in runs])
        solved, key = int((found > SOLVED).sum()), f"elsewhere_{name}"
        figures |= {key: round(found.mean().item(), 2), f"{key}_solved": solved}
        by_seed = ", ".join(f"{x:.0f}" for x in found.tolist())
        rows.append([SHOWN[name][0], f"{found.mean():.0f}", by_seed, f"{solved} of {len(found)}"])
    run.show(
        out,
        "Elsewhere: BipedalWalker-v3 as gymnasium makes it, a new landscape for every episode of at most "
        "1600 steps. Return of the policy kept by each run on the standard terrain, mean over "
        f"{EPISODES} episodes without noise; over seeds, and seed by seed; runs above {SOLVED:g}",
        ["method", "mean", "by seed", "solved"],
        rows,
    )
    return figures


def report_growth(out: Path, results: Results) -> dict[str, run.Figure]:
    """Show how small and how large P has become, layer by layer."""
    figures: dict[str, run.Figure] = {}
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
            rows.append([SHOWN[name][0], terrain, f"{META_RATES[name]:g}", *cells])
    if rows:
        run.show(
            out,
            f"The smallest and the largest eigenvalue of P when last looked at (every {LOOKED_AT_EVERY} "
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


def ended(runs: Sequence[Finished], what: str) -> Tensor:
    """Return a figure of each run, NaN if it has none."""
    values = [one.result.get(what) for one in runs]
    return torch.tensor([torch.nan if x is None else x for x in values], dtype=torch.float64)


def mean_score(runs: Sequence[Finished], part: float) -> Tensor:
    """Return the mean score of each run in the last part of its training; NaN if it did not get there."""
    scores = [one.metrics()["score"] for one in runs]
    late = torch.stack([score[int((1 - part) * len(score)) :].nanmean() for score in scores])
    return late.where(ended(runs, "diverged") == 0, torch.nan)


def steps_to(one: Finished) -> float:
    """Return after how many steps the best policy so far is above what counts as solved; inf if never."""
    metrics = one.metrics()
    there = metrics["best"] > SOLVED
    return metrics["steps"][there][0].item() if there.any() else torch.inf


def _known(value: float) -> float | None:
    return round(value, 2) if abs(value) < torch.inf else None


def _digits(value: float) -> float | None:
    return None if math.isnan(value) else float(f"{value:.3g}")


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
    label, colour = SHOWN[name]
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


def film_best(out: Path, results: Results) -> dict[str, run.Figure]:
    """Write a moving picture of each terrain, and of the policy of ours that walked it best in the end."""
    figures: dict[str, run.Figure] = {}
    for terrain, by_method in results.items():
        ours = [one for name, runs in by_method.items() for one in runs if name != "adam-sb3"]
        if ours:
            best = max(ours, key=lambda one: one.result["walked"])
            film(out / f"{terrain}.gif", best)
            figures[f"{terrain}_film"] = f"{SHOWN[best.task.method][0]}, seed {best.task.seed}"
    return figures
