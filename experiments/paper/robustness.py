"""How much the choice of lr and momentum matters, with FOP and without: the paper's heat maps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from experiments.reporting.summary import Summary, write_summary
from experiments.reporting.tables import show_table
from experiments.runner import experiment, study
from experiments.runner.presets import Preset
from experiments.runner.runs import Finished
from experiments.runner.settings import FromZero
from experiments.vision.config import PAPER, SMOKE, VisionConfig, common_task, prepare
from experiments.vision.methods import METHODS, Method, Name
from experiments.vision.task import Classify

CHANCE = 0.15  # accuracy of ten classes below which a run has failed, if its loss is finite
Tried = Literal["fop", "fop-paper-5e-4", "adam-fop"]
BASES: dict[str, Name] = {"fop": "momentum", "fop-paper-5e-4": "momentum", "adam-fop": "adam"}


@dataclass(frozen=True)
class Config(VisionConfig):
    """Figure 3 of the paper: test accuracy by lr and momentum, and by Adam's lr, with FOP and without.

    FOP is its default, and the printed rule at the paper's 5e-4; runs are paired by seed, and kept in `out`.
    The learning rate is divided by ten after 80 of 150 parts of a run.

    smoke: seconds, on generated images. small: 10,000 images of 16 by 16 pixels (means over squares of
    four), 16 and 32 channels, 6 epochs, about 40 minutes on two cores. paper: 50,000 images, 96 and 192
    channels, 150 epochs, three runs a cell; the paper does not print the values of its axes: they are those
    of small.
    """

    lrs: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    momenta: tuple[FromZero[float], ...] = (0.5, 0.8, 0.9, 0.95, 0.99)
    adam_lrs: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    methods: tuple[Tried, ...] = ("fop", "fop-paper-5e-4", "adam-fop")  # each beside its base
    epochs: int = 6
    test: int = 10_000
    pool: int = 2  # side of the squares of pixels whose mean is taken
    widths: tuple[int, int] = (16, 32)  # channels of the first three layers, and of the layers after
    out: Path = Path("runs/robustness")

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"A deviation over seeds needs two, got seeds={self.seeds}. Pass 2 or more.")


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        **SMOKE,
        out=Path("runs/robustness-smoke"),
        images=128,
        test=128,
        pool=1,
        epochs=1,
        lrs=(0.05, 1e6),
        momenta=(0.9,),
        adam_lrs=(1e-3,),
        seeds=2,
        batch=32,
    ),
    "small": Config(),
    "paper": Config(**PAPER, out=Path("runs/robustness-paper"), pool=1),
}


class Cells(NamedTuple):
    """Test accuracy in percent, and whether a run failed: (momenta, lrs, seeds)."""

    accuracy: Tensor
    failed: Tensor


def main(config: Config) -> None:
    prepare(config, test=config.test)
    experiment.begin(config)
    names: list[Name] = list(dict.fromkeys(x for name in config.methods for x in (BASES[name], name)))
    tasks = {name: grid(config, name) for name in names}
    flat = [task for name in names for task in tasks[name]]
    done = study.carry_out(flat, config.out, config.workers, config.threads)
    finished = {id(task): one for task, one in zip(flat, done, strict=True)}
    cells: dict[str, Cells] = {
        name: gathered(config, name, [finished[id(task)] for task in tasks[name]]) for name in names
    }
    figures: Summary = {}
    for name in config.methods:
        figures |= report(config, name, cells[name], cells[BASES[name]])
    draw(config, cells)
    write_summary(config.out, figures)


def axes_of(config: Config, name: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return the momenta and learning rates that a method is tried at; Adam's momentum is its own."""
    return ((0.9,), config.adam_lrs) if name.startswith("adam") else (config.momenta, config.lrs)


def grid(config: Config, name: Name) -> list[Classify]:
    momenta, lrs = axes_of(config, name)
    return [
        replace(
            common_task(config, Method(name, lr, momentum), seed),
            test=config.test,
            decays=(config.epochs * 80 / 150,),
            pool=config.pool,
        )
        for momentum in momenta
        for lr in lrs
        for seed in config.all_seeds
    ]


def gathered(config: Config, name: str, runs: Sequence[Finished]) -> Cells:
    momenta, lrs = axes_of(config, name)
    shape = (len(momenta), len(lrs), -1)
    accuracy = torch.tensor([r.result["test_accuracy"] for r in runs], dtype=torch.float64)
    diverged = torch.tensor([r.result["diverged"] for r in runs])
    failed = diverged | (accuracy < CHANCE)
    return Cells(100 * accuracy.view(shape), failed.view(shape))


class Comparison(NamedTuple):
    """What FOP gains in each cell, in points; the deviation over seeds, of both together; what that means.

    Better and worse are by at least one deviation; a cell in which FOP fails more often is worse whatever it
    gains, and one in which both fail with every seed is not informative.
    """

    gain: Tensor
    deviation: Tensor
    better: Tensor
    worse: Tensor
    informative: Tensor


def compared(mine: Cells, base: Cells) -> Comparison:
    gain = (mine.accuracy - base.accuracy).mean(-1)
    deviation = ((mine.accuracy.var(-1) + base.accuracy.var(-1)) / 2).sqrt()
    more = mine.failed.sum(-1) > base.failed.sum(-1)
    better = (gain > 0) & (gain >= deviation) & ~more
    worse = (gain < 0) & (gain <= -deviation) | more
    return Comparison(gain, deviation, better, worse, ~(mine.failed & base.failed).all(-1))


def report(config: Config, name: str, mine: Cells, base: Cells) -> Summary:
    """Show both methods cell by cell, and how many cells FOP gains in, and loses in."""
    found = compared(mine, base)
    gain, informative = found.gain[found.informative], found.informative
    figures: Summary = {
        f"{name}_cells": int(informative.sum()),
        f"{name}_cells_where_both_fail": int((~informative).sum()),
        f"{name}_share_no_worse": _share(~found.worse[informative]),
        f"{name}_share_ahead": _share(gain > 0),
        f"{name}_share_better": _share(found.better[informative]),
        f"{name}_mean_gain_points": round(gain.mean().item(), 3) if len(gain) else None,
        f"{name}_worst_cell_points": round(gain.min().item(), 3) if len(gain) else None,
        f"{name}_best_cell_points": round(gain.max().item(), 3) if len(gain) else None,
        f"{name}_best_accuracy": round(mine.accuracy.mean(-1).max().item(), 2),
        f"{name}_base_best_accuracy": round(base.accuracy.mean(-1).max().item(), 2),
        f"{name}_runs_failed_that_base_survived": int((mine.failed & ~base.failed).sum()),
        f"{name}_runs_survived_that_base_failed": int((base.failed & ~mine.failed).sum()),
        f"{name}_base_runs_failed": int(base.failed.sum()),
    }
    momenta, lrs = axes_of(config, name)
    rows = []
    for i, momentum in enumerate(momenta):
        for j, lr in enumerate(lrs):
            means = [f"{x.accuracy[i, j].mean():.1f}" for x in (base, mine)]
            mark = "worse" if found.worse[i, j] else "better" if found.better[i, j] else ""
            failures = f"{int(base.failed[i, j].sum())}, {int(mine.failed[i, j].sum())}"
            where = f"lr {lr:g}" if name.startswith("adam") else f"momentum {momentum:g}, lr {lr:g}"
            differs = [f"{found.gain[i, j]:+.2f}", f"{found.deviation[i, j]:.2f}"]
            rows.append([where, *means, *differs, failures, mark])
    show_table(
        config.out,
        f"{METHODS[name].label}, and {METHODS[BASES[name]].label} alone: test accuracy in percent, mean over "
        "seeds, their difference, the standard deviation over seeds, and failed runs of both. Better, worse: "
        "by at least one standard deviation, or more runs failed",
        ["cell", "alone", "with FOP", "difference", "deviation", "failed", ""],
        rows,
    )
    return figures


def _share(cells: Tensor) -> float | None:
    return round(cells.double().mean().item(), 4) if len(cells) else None


def draw(config: Config, cells: dict[str, Cells]) -> None:
    maps = [name for name in cells if not name.startswith("adam")]
    sweeps = [name for name in cells if name.startswith("adam")]
    figure = Figure(figsize=(4.8 * (len(maps) + bool(sweeps)), 4.4), layout="constrained")
    panels = figure.subplots(1, len(maps) + bool(sweeps), squeeze=False)[0]
    shown = [heat_map(config, axes, name, cells) for axes, name in zip(panels, maps, strict=False)]
    if shown:
        figure.colorbar(shown[0], ax=list(panels[: len(maps)]), label="test accuracy (%)", shrink=0.8)
    for name in sweeps:
        sweep(config, panels[-1], name, cells[name])
    figure.suptitle(
        f"{config.source}, {config.images:,} images, {config.epochs} epochs: test accuracy, mean over "
        f"{config.seeds} seeds"
    )
    figure.savefig(config.out / "robustness.png", dpi=150)


def heat_map(config: Config, axes: Axes, name: str, cells: dict[str, Cells]) -> Any:
    momenta, lrs = axes_of(config, name)
    means = cells[name].accuracy.mean(-1)
    better = compared(cells[name], cells[BASES.get(name, name)]).better
    most = max(x.accuracy.mean(-1).max().item() for x in cells.values())
    shown = axes.imshow(means.numpy(), vmin=0, vmax=most, aspect="auto")
    for i in range(len(momenta)):
        for j in range(len(lrs)):
            dark = means[i, j] < 40
            axes.text(
                j, i, f"{means[i, j]:.1f}", ha="center", va="center", color="white" if dark else "black"
            )
            if better[i, j]:
                axes.add_patch(
                    Rectangle((j - 0.46, i - 0.46), 0.92, 0.92, fill=False, edgecolor="blue", lw=2.5)
                )
    axes.set_xticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
    axes.set_yticks(range(len(momenta)), [f"{momentum:g}" for momentum in momenta])
    axes.set_xlabel("learning rate")
    axes.set_ylabel("momentum")
    note = "\n(blue: better by ≥ 1 standard deviation)" if name in BASES else ""
    axes.set_title(f"{METHODS[name].label}{note}", fontsize=10)
    return shown


def sweep(config: Config, axes: Axes, name: str, cells: Cells) -> None:
    means, one = cells.accuracy[0].mean(-1).numpy(), cells.accuracy[0].std(-1).numpy()
    axes.errorbar(
        config.adam_lrs,
        means,
        one,
        label=METHODS[name].label,
        color=METHODS[name].colour,
        capsize=3,
        marker="o",
    )
    axes.set_xscale("log")
    axes.set_xlim(min(config.adam_lrs) / 1.5, max(config.adam_lrs) * 1.5)  # matplotlib fails to, for one
    axes.set_xlabel("learning rate of Adam")
    axes.set_ylabel("test accuracy (%), mean ± standard deviation")
    axes.set_title("Adam", fontsize=10)
    axes.legend()
