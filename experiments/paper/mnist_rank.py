"""How much the rank of P matters, and how far P turns a gradient: the paper's appendix, on MNIST."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from experiments import data
from experiments.reporting import statistics
from experiments.reporting.plots import band
from experiments.reporting.summary import Summary, write_summary
from experiments.reporting.tables import show_table
from experiments.runner import experiment, study
from experiments.runner.presets import Preset
from experiments.runner.runs import Finished
from experiments.runner.settings import FromZero
from experiments.vision import result_tables
from experiments.vision.config import VisionConfig, common_task, prepare
from experiments.vision.methods import METHODS, Method, Name
from experiments.vision.task import Classify

Rule = Literal["fop-paper", "fop"]
FULL = 784  # the first layer's; of the others it is 100
ANGLES_EVERY = 200  # steps, as in the paper's figure


@dataclass(frozen=True)
class Config(VisionConfig):
    """The appendix's figures of ranks and of angles: a 4-layer net of 100 units on MNIST, P = I + M Mᵀ.

    Rank 0 is momentum (0.9) alone. Within a seed all runs have the same first weights and batches, and are
    compared with rank 0 pair by pair. The test images are evaluated once, at the end of a run.

    smoke: seconds, on generated images. small: 5 epochs, 5 seeds, two learning rates, both rules, about 15
    minutes on two cores. paper: 10 epochs; the paper does not print its learning rate, its meta learning
    rate here, or how long it trains.
    """

    rules: tuple[Rule, ...] = ("fop-paper", "fop")
    ranks: tuple[FromZero[int], ...] = (
        0,
        1,
        2,
        4,
        16,
        64,
        FULL,
    )  # with 0; no more than a layer's inputs are used
    lrs: tuple[float, ...] = (0.001, 0.03)  # the first is low, the second one that suits momentum
    epochs: int = 5
    seeds: int = 5
    images: int = 50_000  # to train on, the first ones
    validation: int = 10_000  # images after those that are trained on
    source: data.Name = "mnist"
    test: int = 10_000
    judge_every: int = 100  # steps, for the validation images
    widths: tuple[int, ...] = (100, 100, 100)  # units of each hidden layer
    out: Path = Path("runs/mnist-rank")

    def __post_init__(self) -> None:
        if 0 not in self.ranks or not any(self.ranks):
            raise ValueError(
                f"ranks={self.ranks} must have 0, with which the others are compared, and others. Name both."
            )


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        preset="smoke",
        out=Path("runs/mnist-rank-smoke"),
        source="generated-digits",
        images=256,
        validation=128,
        test=128,
        widths=(8, 8, 8),
        epochs=1,
        lrs=(0.01,),
        ranks=(0, 2, FULL),
        judge_every=2,
        seeds=2,
        batch=64,
        workers=1,
    ),
    "small": Config(),
    "paper": Config(preset="paper", out=Path("runs/mnist-rank-paper"), epochs=10),
}


Key = tuple[float, Name, int]  # learning rate, method, rank


def main(config: Config) -> None:
    prepare(config, config.validation, config.test)
    experiment.begin(config)
    tasks = {key: [task(config, key, seed) for seed in config.all_seeds] for key in keys(config)}
    flat = [one for of_key in zip(*tasks.values(), strict=True) for one in of_key]
    done = study.carry_out(flat, config.out, config.workers, config.threads)
    found = dict(zip((id(one) for one in flat), done, strict=True))
    results = {key: [found[id(one)] for one in of_key] for key, of_key in tasks.items()}
    figures = report(config, results)
    figures |= report_angles(config, results)
    draw_ranks(config, results)
    draw_angles(config, results)
    write_summary(config.out, figures)


def keys(config: Config) -> list[Key]:
    learned: list[tuple[Name, int]] = [(name, rank) for name in config.rules for rank in config.ranks if rank]
    return [(lr, name, rank) for lr in config.lrs for name, rank in [("momentum", 0), *learned]]


def task(config: Config, key: Key, seed: int) -> Classify:
    lr, name, rank = key
    return replace(
        common_task(config, Method(name, lr, rank=rank or None), seed),
        model="mlp",
        validation=config.validation,
        test=config.test,
        judge_every=config.judge_every,
        angles_every=ANGLES_EVERY,
    )


def report(config: Config, results: Mapping[Key, Sequence[Finished]]) -> Summary:
    """Show the final accuracy of each rank, and its differences from momentum of the same seed."""
    figures: Summary = {}
    for lr in dict.fromkeys(lr for lr, _, _ in results):
        base, rows = results[lr, "momentum", 0], []
        for (own, name, rank), runs in results.items():
            if own != lr:
                continue
            accuracy = result_tables.spread(result_tables.accuracies(runs, "test"))
            key = f"lr{lr:g}_{name}_rank{rank}"
            figures |= {f"{key}_accuracy": accuracy.mean, f"{key}_diverged": accuracy.diverged}
            if rank == 0:
                rows.append([METHODS[name].label, "0", accuracy.shown(2), *["–"] * 5])
                continue
            gain = result_tables.accuracies(runs, "test") - result_tables.accuracies(base, "test")
            found, p = statistics.interval(gain), statistics.p_value(gain)
            epoch = config.images // config.batch
            early = statistics.interval(first_losses(runs, epoch) - first_losses(base, epoch)).mean
            ahead = f"{int((gain > 0).sum())} of {len(gain)}"
            ends = [None if x is None else round(x, 4) for x in found]
            figures |= zip((f"{key}_gain{end}" for end in ("", "_low", "_high")), ends, strict=True)
            figures |= {f"{key}_p": None if p is None else float(f"{p:.2g}"), f"{key}_ahead": ahead}
            figures[f"{key}_first_epoch_loss_difference"] = None if early is None else round(early, 4)
            cells = ["–" if x is None else f"{x:+.2f}" for x in found]
            between = f"{cells[1]} to {cells[2]}"
            more = ["–" if p is None else f"{p:.2g}", ahead, "–" if early is None else f"{early:+.4f}"]
            rank_shown = "full" if rank >= FULL else str(rank)
            rows.append([METHODS[name].label, rank_shown, accuracy.shown(2), cells[0], between, *more])
        show_table(
            config.out,
            f"lr {lr:g}: test accuracy in percent ± standard deviation over seeds; its difference from rank "
            "0, pair by pair, in points, with a 95 % t-interval and Student's p, not adjusted for their "
            "number; and the difference in mean training loss over the first epoch, in nats",
            ["rule", "rank", "accuracy", "difference", "interval", "p", "ahead", "first epoch"],
            rows,
        )
    return figures


def first_losses(runs: Sequence[Finished], epoch: int) -> Tensor:
    """Return the mean training loss over the first epoch, of each seed: how fast training begins."""
    return torch.stack([r.metrics()["loss"][:epoch].mean() for r in runs])


def angles_of(runs: Sequence[Finished]) -> dict[str, Tensor]:
    """Return the angles of each layer in degrees, (seeds, times)."""
    metrics = [r.metrics() for r in runs]
    names = [name for name in metrics[0] if name.startswith("angle/")]
    return {name: statistics.gathered([m[name][::ANGLES_EVERY] for m in metrics]) for name in names}


def report_angles(config: Config, results: Mapping[Key, Sequence[Finished]]) -> Summary:
    rows, figures = [], {}
    for (lr, name, rank), runs in results.items():
        if rank == max(rank for _, _, rank in results):
            for i, (_, angles) in enumerate(angles_of(runs).items()):
                last = angles[:, -1]
                if not last.isfinite().all():  # one has diverged
                    continue
                figures[f"lr{lr:g}_{name}_layer{i + 1}_last_angle"] = round(last.mean().item(), 2)
                ends = [f"{x:.1f}" for x in (last.mean(), last.min(), last.max(), angles.max())]
                rows.append([METHODS[name].label, f"{lr:g}", str(i + 1), *ends])
    show_table(
        config.out,
        f"Rank {max(config.ranks)}, or as many as a layer has inputs: the angle in degrees between a "
        "gradient and P times it, when last measured (mean and range over seeds), and the largest at any "
        "time. The paper: usually slightly below 45°",
        ["rule", "lr", "layer", "mean", "lowest", "highest", "largest ever"],
        rows,
    )
    return figures


def draw_ranks(config: Config, results: Mapping[Key, Sequence[Finished]]) -> None:
    figure = Figure(figsize=(6 * len(config.rules), 4.4 * len(config.lrs)), layout="constrained")
    panels = figure.subplots(len(config.lrs), len(config.rules), squeeze=False)
    ranks = [rank for rank in config.ranks if rank]
    for row, lr in zip(panels, config.lrs, strict=True):
        for axes, name in zip(row, config.rules, strict=True):
            curve(axes, results[lr, "momentum", 0], "momentum (rank 0)", "black", 2.0)
            for i, rank in enumerate(ranks):
                shade = 0.25 + 0.75 * i / max(len(ranks) - 1, 1)
                label = "full rank" if rank >= FULL else f"rank {rank}"
                curve(axes, results[lr, name, rank], label, (*to_rgb(METHODS[name].colour), shade), 1.2)
            axes.set_title(f"MNIST, {METHODS[name].label}, lr {lr:g}: mean over {config.seeds} seeds")
            axes.set_xlabel("steps")
            axes.set_ylabel("error on validation images (%)")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.legend(fontsize="small")
    figure.savefig(config.out / "ranks.png", dpi=150)


def curve(axes: Axes, runs: Sequence[Finished], label: str, colour: Any, width: float) -> None:
    """Draw the error on validation images over training, its mean over seeds."""
    every = runs[0].task.judge_every
    accuracy = statistics.gathered([r.metrics()["validation_accuracy"][every - 1 :: every] for r in runs])
    steps = (torch.arange(accuracy.shape[1]) + 1) * every
    band(axes, steps, 100 - 100 * accuracy, label, colour, width, shaded=False)


def draw_angles(config: Config, results: Mapping[Key, Sequence[Finished]]) -> None:
    figure = Figure(figsize=(6 * len(config.rules), 4.4 * len(config.lrs)), layout="constrained")
    panels = figure.subplots(len(config.lrs), len(config.rules), squeeze=False)
    for row, lr in zip(panels, config.lrs, strict=True):
        for axes, name in zip(row, config.rules, strict=True):
            for i, angles in enumerate(angles_of(results[lr, name, max(config.ranks)]).values()):
                steps = torch.arange(angles.shape[1]) * ANGLES_EVERY
                band(axes, steps, angles, f"layer {i + 1}", f"C{i}")
            axes.axhline(45, color="grey", linestyle=":", label="45°")
            axes.set_title(f"MNIST, {METHODS[name].label}, largest rank, lr {lr:g}: mean and range")
            axes.set_xlabel("steps")
            axes.set_ylabel("angle between ∇J and P ∇J (degrees)")
            axes.legend(fontsize="small")
    figure.savefig(config.out / "angles.png", dpi=150)
