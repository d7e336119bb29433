"""What the runs of a biped tell: how well it walks, how soon, who is ahead, and what FOP has learned."""

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
BASES: tuple[Name, ...] = ("momentum", "adam")  # that FOP is said to be ahead of
LAYERS = {"hidden.0": "first", "hidden.2": "second", "mean": "actions", "value": "value"}
SHOWN = {name: (look.label, look.colour) for name, look in LOOKS.items()}  # label and colour
SHOWN["adam-sb3"] = ("Adam, Stable-Baselines3", "C6")
SHOWN["fop-paper-1e-5"], SHOWN["fop-5e-4"] = ("FOP, printed rule at 1e-5", "C3"), ("FOP at 5e-4", "C9")

LATE = 0.2  # of the training, its end

Results = Mapping[Terrain, Mapping[Name, Sequence[Finished]]]


def tell(out: Path, results: Results) -> dict[str, run.Figure]:
    """Show tables, draw a figure, make films; return the figures of the tables."""
    figures = report(out, results) | report_pairs(out, results)
    figures |= report_elsewhere(out, results) | report_growth(out, results)
    draw(out, results)
    film_best(out, results)
    return figures


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
                "late": late(runs).mean(),
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
            cells = [*cells[:5], f"{solved} of {len(runs)}", cells[5], str(diverged), *cells[6:]]
            rows.append([SHOWN[name][0], f"{RATES[name]:g}", *cells])
        run.show(
            out,
            f"The {terrain} terrain. A policy's score is the mean return of the last episodes. Best: score "
            "of the best policy so far, in the end, median over seeds, with a 95 % bootstrap interval (of "
            f"few seeds, their range). Late: of all policies in the last {LATE:.0%} of the training, mean "
            f"over seeds. Walked: what the best policy returns in {EPISODES} episodes in the end, without "
            f"noise, mean over seeds. Solved: runs whose score came above {SOLVED:g}; steps: the median "
            "thousands of them until then. Walks, learns: steps of the environments in a second of one core, "
            "to walk, and to learn too",
            [
                *("method", "lr", "best", "low", "high", "late", "walked", "solved", "steps", "diverged"),
                *("walks", "learns"),
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
            gains = {"": ended(ours, "best") - ended(theirs, "best"), "_late": late(ours) - late(theirs)}
            cells = [f"{SHOWN[name][0]} over {SHOWN[base][0]}", terrain]
            for what, gain in gains.items():
                found, p, key = (
                    paired.interval(gain),
                    paired.p_value(gain),
                    f"{terrain}_{name}_over_{base}{what}",
                )
                ends = zip(("", "_low", "_high"), found, strict=True)
                figures |= {f"{key}{end}": None if x is None else round(x, 2) for end, x in ends}
                figures[f"{key}_p"] = None if p is None else float(f"{p:.2g}")
                figures[f"{key}_ahead"] = f"{int((gain > 0).sum())} of {len(gain)}"
                cells += ["–" if x is None else f"{x:+z.0f}" for x in found]
                cells += ["–" if p is None else f"{p:.1g}", str(figures[f"{key}_ahead"])]
            rows.append(cells)
    parts = ("low", "high", "p", "ahead")
    run.show(
        out,
        "Returns of the best policy so far in the end, and of all late policies: differences within a seed, "
        "their mean, a 95 % t-interval, Student's p, not adjusted for their number, and seeds ahead",
        ["methods", "terrain", "best", *parts, "late", *parts],
        rows,
    )
    return figures


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
        "1600 steps. Return of the best policy of each run on the standard terrain, mean over "
        f"{EPISODES} episodes without noise; over seeds, and seed by seed; runs above {SOLVED:g}",
        ["method", "mean", "by seed", "solved"],
        rows,
    )
    return figures


def report_growth(out: Path, results: Results) -> dict[str, run.Figure]:
    """Show how large P has become, layer by layer."""
    figures: dict[str, run.Figure] = {}
    rows = []
    for terrain, by_method in results.items():
        for name, runs in by_method.items():
            if name not in META_RATES:
                continue
            found = [largest(one) for one in runs]
            middle = {layer: torch.tensor([one[layer] for one in found]).quantile(0.5) for layer in LAYERS}
            figures |= {f"{terrain}_{name}_largest_{layer}": _known(x.item()) for layer, x in middle.items()}
            cells = [f"{x:.3g}" if x.isfinite() else "–" for x in middle.values()]
            rows.append([SHOWN[name][0], terrain, f"{META_RATES[name]:g}", *cells])
    run.show(
        out,
        f"The largest eigenvalue of P when last looked at (every {LOOKED_AT_EVERY} improvements of a "
        "policy), by layer, median over seeds; P starts as the identity",
        ["method", "terrain", "meta lr", *LAYERS.values()],
        rows,
    )
    return figures


def largest(one: Finished) -> dict[str, float]:
    """Return the largest eigenvalue of P by layer, as last written for TensorBoard; NaN if it was not."""
    events = EventAccumulator(str(one.folder), purge_orphaned_data=False)
    events.Reload()
    seen, found = events.Tags()["scalars"], dict.fromkeys(LAYERS, torch.nan)
    for layer in LAYERS:
        tag = f"eigenvalue_max/{layer}.weight"
        if tag in seen:
            found[layer] = max(events.Scalars(tag), key=lambda event: (event.step, event.wall_time)).value
    return found


def ended(runs: Sequence[Finished], what: str) -> Tensor:
    """Return a figure of each run, NaN if it has none."""
    values = [one.result.get(what) for one in runs]
    return torch.tensor([torch.nan if x is None else x for x in values], dtype=torch.float64)


def late(runs: Sequence[Finished]) -> Tensor:
    """Return the mean score of each run in the last part of its training; NaN if it has none."""
    scores = [one.metrics()["score"] for one in runs]
    return torch.stack([score[int((1 - LATE) * len(score)) :].mean() for score in scores])


def steps_to(one: Finished) -> float:
    """Return after how many steps the best policy so far is above what counts as solved; inf if never."""
    metrics = one.metrics()
    there = metrics["best"] > SOLVED
    return metrics["steps"][there][0].item() if there.any() else torch.inf


def _known(value: float) -> float | None:
    return round(value, 2) if abs(value) < torch.inf else None


def draw(out: Path, results: Results) -> None:
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    for axes, (terrain, by_method) in zip(figure.subplots(1, len(results)), results.items(), strict=True):
        for name, runs in by_method.items():
            curve(axes, name, runs)
        axes.axhline(SOLVED, color="grey", linestyle=":", linewidth=1)
        axes.set_title(f"{terrain} terrain, {len(next(iter(by_method.values())))} seeds")
        axes.set_xlabel("steps of the environments (thousands)")
        axes.set_ylabel("return of the best policy so far")
        axes.legend(fontsize="small")
    figure.suptitle("BipedalWalker by PPO: median over seeds; shaded, its 95 % bootstrap interval")
    figure.savefig(out / "bipedal.png", dpi=150)


def curve(axes: Axes, name: Name, runs: Sequence[Finished]) -> None:
    """Draw the best return so far, once every run has one; a run that diverged keeps its last.

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


def film_best(out: Path, results: Results) -> None:
    """Write a moving picture of each terrain, and of the policy that walked it best in the end."""
    for terrain, by_method in results.items():
        runs = [one for runs in by_method.values() for one in runs]
        film(out / f"{terrain}.gif", max(runs, key=lambda one: one.result["walked"]))
