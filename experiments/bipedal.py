"""A biped that learns to walk by PPO, with FOP and without: the paper's reinforcement learning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments import paired, run, study
from experiments.medians import median
from experiments.methods import LOOKS
from experiments.ppo import Settings
from experiments.presets import Preset
from experiments.runs import Finished
from experiments.walk import META_RATES, RATES, Name, Terrain, Through, Walk

SOLVED = 200.0  # return; a walk to the far end is worth about 300
SHOWN = {name: (look.label, look.colour) for name, look in LOOKS.items()}  # label and colour
SHOWN["adam-sb3"] = ("Adam, Stable-Baselines3", "C6")
SHOWN["fop-paper-1e-5"], SHOWN["fop-5e-4"] = ("FOP, printed rule at 1e-5", "C3"), ("FOP at 5e-4", "C9")


@dataclass(frozen=True)
class Config:
    """The paper's figure: the return of the best policy so far, by steps, on two terrains.

    PPO-Clip, with 40 hidden units in each of two layers that policy and value share; momentum, Adam, and FOP
    around momentum, at full rank on every layer, with the paper's learning rates. The landscape stays the
    same; start and push are drawn anew for every episode, of at most 2000 steps. Runs are kept in `out`: a
    study that was interrupted goes on, and finished runs are not repeated.

    smoke: half a minute. small: a million steps on the standard terrain, half a million on the rough one,
    three seeds, about 90 minutes on two cores. paper: ten runs on one terrain and five on the other, as in
    the paper, which does not print their length: here it is ten million steps.
    """

    preset: Preset = "small"
    methods: tuple[Name, ...] = ("momentum", "adam", "fop-paper", "fop")  # adam-sb3 needs the extra `peers`
    steps: int = 1_000_000  # on the standard terrain, of all environments together
    rough_steps: int = 500_000
    seeds: int = 3
    rough_seeds: int = 3
    environments: int = 8  # side by side in each run
    landscape: int = 0  # seed of the terrains
    ppo: Settings = field(default_factory=Settings)
    scored: int = 20  # the last episodes, whose mean return is the score of a policy
    through: Through = "optim"  # how the policy is improved; "functional" gives the same numbers
    workers: int = study.WORKERS  # runs side by side
    seed: int = 0  # the first
    threads: int = 1  # of each run
    out: Path = Path("runs/bipedal")

    def __post_init__(self) -> None:
        plan(self)  # what cannot be walked is refused here


def plan(config: Config) -> list[Walk]:
    """Return the runs, seed by seed: what an interrupted study leaves is whole pairs."""
    length: dict[Terrain, tuple[int, int]] = {
        "standard": (config.seeds, config.steps),
        "rough": (config.rough_seeds, config.rough_steps),
    }
    return [
        Walk(
            method=name,
            lr=RATES[name],
            seed=config.seed + i,
            terrain=terrain,
            landscape=config.landscape,
            steps=steps,
            environments=config.environments,
            ppo=config.ppo,
            through=config.through,
            scored=config.scored,
        )
        for terrain, (seeds, steps) in length.items()
        for i in range(seeds)
        for name in config.methods
    ]


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        preset="smoke",
        out=Path("runs/bipedal-smoke"),
        steps=4096,
        rough_steps=4096,
        seeds=2,
        rough_seeds=1,
        scored=3,
        ppo=Settings(horizon=128, epochs=1),
        workers=1,
    ),
    "small": Config(),
    "paper": Config(
        preset="paper",
        out=Path("runs/bipedal-paper"),
        steps=10_000_000,
        rough_steps=10_000_000,
        seeds=10,
        rough_seeds=5,
    ),
}


Results = Mapping[tuple[str, str], Sequence[Finished]]  # by terrain and method


def main(config: Config) -> None:
    needed = {"gymnasium": "rl", "Box2D": "rl"}
    needed |= {"stable_baselines3": "peers"} if "adam-sb3" in config.methods else {}
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({needed[name] for name in missing}))
        raise SystemExit(
            f'bipedal needs {" and ".join(missing)}, not installed here. Run: pip install "metafop[{extras}]"'
        )
    run.begin(config)
    tasks = plan(config)
    done = study.carry_out(tasks, config.out, config.workers, config.threads)
    results = {
        (terrain, name): [r for r in done if (r.task.terrain, r.task.method) == (terrain, name)]
        for terrain in get_args(Terrain)
        for name in config.methods
    }
    figures = report(config, results)
    figures |= report_pairs(config, results)
    figures |= report_elsewhere(config, results)
    draw(config, results)
    film_best(config, results)
    run.finish(config.out, figures)


def report(config: Config, results: Results) -> dict[str, run.Figure]:
    """Show how well each method walks in the end, how soon it walks, and how fast it is computed."""
    figures: dict[str, run.Figure] = {}
    for terrain in get_args(Terrain):
        rows = []
        for name in config.methods:
            runs = results[terrain, name]
            best, solved = median(ended(runs, "best")), int((ended(runs, "best") > SOLVED).sum())
            diverged = sum(one.result["diverged"] for one in runs)
            found = {
                "best": best.middle,
                "best_low": best.low,
                "best_high": best.high,
                "final": ended(runs, "final").mean(),
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
            config.out,
            f"The {terrain} terrain: return of the best policy so far (a mean over the last {config.scored} "
            "episodes), median over seeds, with a 95 % bootstrap interval (of few seeds, their range); the "
            "last episodes of all, and 20 that the best policy walks in the end, without noise, mean over "
            f"seeds; runs that came above {SOLVED:g}, and the median thousands of steps until then; runs "
            "that diverged; and steps of the environments in a second of one core, to walk, and to learn too",
            [
                *("method", "lr", "best", "low", "high", "last", "walked", "solved", "steps", "diverged"),
                *("walks", "learns"),
            ],
            rows,
        )
    return figures


def report_pairs(config: Config, results: Results) -> dict[str, run.Figure]:
    """Show FOP against what it is said to be ahead of, and our PPO against another, pair by pair."""
    figures: dict[str, run.Figure] = {}
    rows = []
    pairs = [(name, base) for name in META_RATES for base in ("momentum", "adam")]
    for terrain in get_args(Terrain):
        for name, base in [*pairs, ("adam", "adam-sb3")]:
            if name not in config.methods or base not in config.methods:
                continue
            gain = ended(results[terrain, name], "best") - ended(results[terrain, base], "best")
            found, p, key = paired.interval(gain), paired.p_value(gain), f"{terrain}_{name}_over_{base}"
            ends = zip(("", "_low", "_high"), found, strict=True)
            figures |= {f"{key}{end}": None if x is None else round(x, 2) for end, x in ends}
            figures[f"{key}_p"] = None if p is None else float(f"{p:.2g}")
            figures[f"{key}_ahead"] = f"{int((gain > 0).sum())} of {len(gain)}"
            cells = ["–" if x is None else f"{x:+.0f}" for x in found]
            cells += ["–" if p is None else f"{p:.1g}", str(figures[f"{key}_ahead"])]
            rows.append([f"{SHOWN[name][0]} over {SHOWN[base][0]}", terrain, *cells])
    run.show(
        config.out,
        "Return of the best policy so far, in the end: differences within a seed, their mean, a 95 % "
        "t-interval, and Student's p, not adjusted for their number",
        ["methods", "terrain", "mean", "low", "high", "p", "ahead"],
        rows,
    )
    return figures


def report_elsewhere(config: Config, results: Results) -> dict[str, run.Figure]:
    """Show how well what was learned on one landscape walks on others."""
    from experiments.strolls import EPISODES, return_elsewhere  # what needs the extra `rl`

    figures: dict[str, run.Figure] = {}
    rows = []
    for name in config.methods:
        found = torch.tensor([return_elsewhere(one) for one in results["standard", name]])
        solved, key = int((found > SOLVED).sum()), f"elsewhere_{name}"
        figures |= {key: round(found.mean().item(), 2), f"{key}_solved": solved}
        by_seed = ", ".join(f"{x:.0f}" for x in found.tolist())
        rows.append([SHOWN[name][0], f"{found.mean():.0f}", by_seed, f"{solved} of {len(found)}"])
    run.show(
        config.out,
        "Elsewhere: BipedalWalker-v3 as gymnasium makes it, a new landscape for every episode of at most "
        "1600 steps. Return of the best policy of each run on the standard terrain, mean over "
        f"{EPISODES} episodes without noise; over seeds, and seed by seed; runs above {SOLVED:g}",
        ["method", "mean", "by seed", "solved"],
        rows,
    )
    return figures


def ended(runs: Sequence[Finished], what: str) -> Tensor:
    """Return a figure of each run, NaN if it has none."""
    values = [one.result.get(what) for one in runs]
    return torch.tensor([torch.nan if x is None else x for x in values], dtype=torch.float64)


def steps_to(one: Finished) -> float:
    """Return after how many steps the best policy so far is above what counts as solved; inf if never."""
    metrics = one.metrics()
    there = metrics["best"] > SOLVED
    return metrics["steps"][there][0].item() if there.any() else torch.inf


def _known(value: float) -> float | None:
    return round(value, 2) if abs(value) < torch.inf else None


def draw(config: Config, results: Results) -> None:
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    for axes, terrain in zip(figure.subplots(1, 2), get_args(Terrain), strict=True):
        for name in config.methods:
            curve(axes, name, results[terrain, name])
        axes.axhline(SOLVED, color="grey", linestyle=":", linewidth=1)
        axes.set_title(f"{terrain} terrain, {len(results[terrain, config.methods[0]])} seeds")
        axes.set_xlabel("steps of the environments (thousands)")
        axes.set_ylabel("return of the best policy so far")
        axes.legend(fontsize="small")
    figure.suptitle("BipedalWalker by PPO: median over seeds; shaded, its 95 % bootstrap interval")
    figure.savefig(config.out / "bipedal.png", dpi=150)


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


def film_best(config: Config, results: Results) -> None:
    """Write a moving picture of each terrain, and of the policy that walked it best in the end."""
    from experiments.strolls import film  # what needs the extra `rl`

    for terrain in get_args(Terrain):
        runs = [one for name in config.methods for one in results[terrain, name]]
        film(config.out / f"{terrain}.gif", max(runs, key=lambda one: one.result["walked"]))
