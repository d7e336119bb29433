"""The paper's results on CIFAR-10: every method tuned on validation images, and compared pair by pair."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from experiments.reporting.summary import Summary, write_summary
from experiments.reporting.tables import show_table
from experiments.runner import experiment, study
from experiments.runner.presets import Preset
from experiments.runner.runs import Finished
from experiments.runner.settings import FromZero, MayBeEmpty
from experiments.vision import result_tables
from experiments.vision.config import PAPER, SMOKE, VisionConfig, common_task, prepare
from experiments.vision.methods import METHODS, Method, Name
from experiments.vision.step_timing import Timing
from experiments.vision.task import Classify
from experiments.vision.training_curves import draw_training

COMPARED: tuple[Name, ...] = tuple(name for name in get_args(Name) if name != "adam-fop")
HEADLINE: tuple[Name, ...] = ("momentum", "fop-paper", "fop-paper-5e-4", "fop")  # of more seeds
GRIDS: dict[str, tuple[float, ...]] = {
    "adam": (3e-4, 1e-3, 3e-3, 1e-2),
    "adam-fop": (3e-4, 1e-3, 3e-3, 1e-2),
    "muon": (5e-3, 1e-2, 2e-2, 5e-2),
}
GRID = (0.02, 0.05, 0.1, 0.2)  # for all others
UNTUNED = {"adam": 1e-3, "adam-fop": 1e-3, "muon": 2e-2}
ROUNDS = 12  # of ten steps of each method, to measure their time
TUNING_SEED = 1000  # none of the seeds that are reported
# Test accuracy, additional parameters and additional time in percent, as printed.
PRINTED = {
    "momentum": ("90.9 ± 0.1", "0", "0.0"),
    "s-hd": ("91.0 ± 0.2", "9", "0.2"),
    "pp-hd": ("91.3 ± 0.3", "≈ 1.4M", "5.9"),
    "fop-norm": ("91.3 ± 0.1", "65", "1.0"),
    "fop-paper": ("91.5 ± 0.2", "65", "0.8"),
}


@dataclass(frozen=True)
class Config(VisionConfig):
    """The paper's table and curves on CIFAR-10: a 9-layer conv net, momentum, and FOP around it.

    Each method is first tuned: its learning rate over the same number of settings, by accuracy on validation
    images, with a separate seed. Then it is run with every seed, and the test images are evaluated once.
    Within a seed all methods have the same first weights and batches. Runs are kept in `out`: an interrupted
    study resumes, and finished runs are not repeated.

    smoke: half a minute, on generated images. small: 10,000 images, 16 and 32 channels, 15 epochs, about 2.5
    hours on two cores. paper: 50,000 images, 96 and 192 channels, 150 epochs, lr 0.05 divided by ten after
    80, untuned: for an accelerator.
    """

    methods: tuple[Name, ...] = COMPARED  # momentum must be among them
    validation: FromZero[int] = 5000  # images after those that are trained on
    test: int = 10_000
    widths: tuple[int, int] = (16, 32)  # channels of the first three layers, and of the layers after
    decay: FromZero[float] = 10.5  # epochs after which the learning rate is divided by ten
    meta_lrs: MayBeEmpty[tuple[float, ...]] = (
        1e-3,
        2e-3,
    )  # of FOP, tried with the tuning seed besides its own
    settings: FromZero[int] = 4  # learning rates that each method is tuned over; 0: the paper's, untuned
    headline_seeds: int = 12  # of momentum, the printed rule and FOP
    out: Path = Path("runs/cifar10")

    def __post_init__(self) -> None:
        if "momentum" not in self.methods:
            raise ValueError(
                f"methods={self.methods} lacks momentum, with which the others are compared. Name it too."
            )
        if not 0 <= self.settings <= len(GRID) or (self.settings and not self.validation):
            raise ValueError(
                f"settings must be from 0 to {len(GRID)}, and 0 if there are no validation images; got "
                f"{self.settings} with {self.validation} images. Pass fewer settings, or more images."
            )


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        **SMOKE,
        out=Path("runs/cifar10-smoke"),
        images=256,
        validation=128,
        test=128,
        epochs=2,
        decay=1.0,
        settings=2,
        meta_lrs=(1e-3,),
        seeds=2,
        headline_seeds=3,
        batch=64,
    ),
    "small": Config(),
    "paper": Config(
        **PAPER,
        out=Path("runs/cifar10-paper"),
        validation=0,
        decay=80.0,
        settings=0,
        headline_seeds=3,
    ),
}


def main(config: Config) -> None:
    prepare(config, config.validation, config.test)
    experiment.begin(config)
    tuning = tuned(config)
    moved = with_meta_lrs(config, tuning)
    chosen = {name: best(runs) for name, runs in tuning.items()} or untuned(config)
    tasks = [task(config, chosen[name], seed, config.test) for seed, name in plan(config)]
    done = study.carry_out(tasks, config.out, config.workers, config.threads)
    results = {name: [r for r in done if r.task.method.name == name] for name in config.methods}
    methods = tuple(sorted(chosen.values(), key=lambda method: method.name != "momentum"))
    timing = Timing(tasks[0], methods, ROUNDS)
    [times] = study.carry_out([timing], config.out, workers=1, threads=config.threads)
    figures = report_tuning(config, tuning) | report_meta_lrs(config, tuning, moved)
    epoch, ours = config.images // config.batch, f"{config.images:,} images, {config.epochs} epochs"
    ours += f", {config.widths[0]} and {config.widths[1]} channels"
    figures |= result_tables.paper_table(config.out, results, times.result, PRINTED, "test", ours)
    figures |= result_tables.pairs_table(config.out, results, "test", epoch, config.decay)
    picture, what = config.out / "cifar10.png", f"CIFAR-10, {ours}"
    draw_training(picture, results, epoch, config.epochs, (config.decay,), what)
    write_summary(config.out, figures)


def task(config: Config, method: Method, seed: int, test: int) -> Classify:
    """Return a run; `test` is how many test images are evaluated at its end."""
    common = common_task(config, method, seed)
    return replace(common, validation=config.validation, test=test, decays=(config.decay,))


def plan(config: Config) -> list[tuple[int, Name]]:
    """Return seed and method of each run, seed by seed: what an interrupted study leaves is whole pairs."""
    counts = {name: config.headline_seeds if name in HEADLINE else config.seeds for name in config.methods}
    seeds = range(config.seed, config.seed + max(counts.values()))
    return [(seed, name) for seed in seeds for name in config.methods if seed - config.seed < counts[name]]


def tuned(config: Config) -> dict[str, list[Finished]]:
    """Return the runs by which the settings are chosen, by method; none if nothing is to be chosen."""
    if not config.settings:
        return {}
    tried = [Method(name, lr) for name in config.methods for lr in grid(name, config.settings)]
    tasks = [task(config, method, TUNING_SEED, test=0) for method in tried]
    done = study.carry_out(tasks, config.out, config.workers, config.threads)
    return {name: [r for r in done if r.task.method.name == name] for name in config.methods}


def with_meta_lrs(config: Config, tuning: Mapping[str, Sequence[Finished]]) -> list[Finished]:
    """Return runs of FOP as it was tuned, at other meta learning rates: nothing is chosen by them."""
    if "fop" not in tuning:
        return []
    methods = [replace(best(tuning["fop"]), meta_lr=meta_lr) for meta_lr in config.meta_lrs]
    tasks = [task(config, method, TUNING_SEED, test=0) for method in methods]
    return study.carry_out(tasks, config.out, config.workers, config.threads)


def untuned(config: Config) -> dict[str, Method]:
    """Return every method at the paper's learning rate; those that are not the paper's, at the usual one."""
    return {name: Method(name, UNTUNED.get(name, 0.05)) for name in config.methods}


def grid(name: str, settings: int) -> tuple[float, ...]:
    whole = GRIDS.get(name, GRID)
    start = (len(whole) - settings) // 2
    return whole[start : start + settings]


def best(runs: Sequence[Finished]) -> Method:
    return max(
        runs, key=lambda r: -math.inf if r.result["diverged"] else r.result["validation_accuracy"]
    ).task.method


def report_tuning(config: Config, tuning: Mapping[str, Sequence[Finished]]) -> Summary:
    """Show how each method was tuned; a best setting at an end of its grid might have a better one beyond."""
    figures: Summary = {}
    rows = []
    for name, runs in tuning.items():
        chosen, lrs = best(runs), [r.task.method.lr for r in runs]
        end = chosen.lr in (min(lrs), max(lrs))
        cells = [f"{validation_accuracy(r)} at {r.task.method.lr:g}" for r in runs]
        rows.append([METHODS[name].label, *cells, f"{chosen.lr:g}{' (an end)' if end else ''}"])
        figures |= {f"{name}_tuned_to": chosen.lr, f"{name}_at_an_end": int(end)}
    if rows:
        error = 100 * (0.65 * 0.35 / config.validation) ** 0.5
        show_table(
            config.out,
            f"Tuning: validation accuracy in percent on {config.validation} images at each learning rate, "
            f"seed {TUNING_SEED}; the best is taken. By the choice of images alone an accuracy of 65 % has a "
            f"standard error of {error:.1f} points",
            ["method", *(f"setting {i + 1}" for i in range(config.settings)), "taken"],
            rows,
        )
    return figures


def report_meta_lrs(
    config: Config, tuning: Mapping[str, Sequence[Finished]], moved: Sequence[Finished]
) -> Summary:
    """Show what a smaller meta learning rate does to FOP, against momentum, both as they were tuned."""
    if not moved:
        return {}
    figures: Summary = {}
    rows = []
    base, own = (next(r for r in tuning[x] if r.task.method == best(tuning[x])) for x in ("momentum", "fop"))
    for one in (*moved, own):
        ratio = result_tables.views([one], [base], "validation", config.images // config.batch, config.decay)
        steps = ratio["steps_ratio"][0].item()
        meta_lr = one.task.method.meta_lr
        word = "its own" if meta_lr is None else f"{meta_lr:g}"
        rows.append([word, "–" if math.isnan(steps) else f"{steps:.3f}", validation_accuracy(one)])
        if meta_lr is not None:
            figures[f"fop_at_{meta_lr:g}_steps_ratio"] = None if math.isnan(steps) else round(steps, 4)
            figures[f"fop_at_{meta_lr:g}_validation"] = round(100 * one.result["validation_accuracy"], 2)
    show_table(
        config.out,
        f"FOP at other meta learning rates, with the seed of tuning: steps ratio, and validation accuracy in "
        f"percent, of which momentum has {validation_accuracy(base)}. Nothing was chosen by it",
        ["meta learning rate", "steps ratio", "accuracy"],
        rows,
    )
    return figures


def validation_accuracy(finished: Finished) -> str:
    diverged = finished.result["diverged"]
    return "diverged" if diverged else f"{100 * finished.result['validation_accuracy']:.1f}"
