"""The figures, the tables and the picture of bench-unroll."""

from dataclasses import asdict
from statistics import median

import torch
from matplotlib.figure import Figure

from experiments.benchmarks.unroll.config import Config
from experiments.benchmarks.unroll.measure import Result
from experiments.benchmarks.unroll.methods import PEERS
from experiments.benchmarks.unroll.peers import Grads
from experiments.measuring.timing import ratio
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from metafop.tensorboard import Logger

MIB = 2**20
COLORS = {"loop": "#999999", "training": "#999999", **dict.fromkeys(PEERS, "#d55e00")}  # ours are blue


def figures_of(name: str, result: Result) -> Summary:
    """Return every figure of a case, those "vs_best_peer" against the peer that is better in just that."""
    tensors = {method: float(found.tensors) for method, found in result.memory.items()}
    resident = {
        method: found.resident for method, found in result.memory.items() if found.resident is not None
    }
    quick = min(PEERS, key=lambda peer: median(result.seconds[peer]))
    small = min(PEERS, key=lambda peer: tensors[peer])
    figures: Summary = {f"{name}_best_peer_time": quick, f"{name}_best_peer_memory": small}
    for method, seconds in result.seconds.items():
        figures |= {
            f"{key(name, method)}_time_vs_best_peer": ratio(seconds, result.seconds[quick]),
            f"{key(name, method)}_time_vs_training": ratio(seconds, result.seconds["training"]),
            f"{key(name, method)}_memory_vs_best_peer": round(tensors[method] / tensors[small], 4),
            f"{key(name, method)}_ms": round(1e3 * median(seconds), 2),
            f"{key(name, method)}_mib": round(tensors[method] / MIB, 2),
            f"{key(name, method)}_error": error(result.grads[method], result.grads["loop"]),
        }
        if method in result.compiling:
            figures[f"{key(name, method)}_compile_seconds"] = round(result.compiling[method], 1)
        if resident:
            best = min(resident[peer] for peer in PEERS)
            figures[f"{key(name, method)}_resident_vs_best_peer"] = round(resident[method] / best, 4)
            figures[f"{key(name, method)}_resident_mib"] = round(resident[method] / MIB, 2)
    return figures | _plainly(name, figures)


def _plainly(name: str, figures: Summary) -> Summary:
    """Return what stands for a case as a whole: the figures of the way that is meant for it."""
    net, _, _ = name.partition("_")
    plain: Summary = {f"{net}_time_vs_plain_training": figures[f"{name}_fast_time_vs_training"]}
    if net == "transformer":
        for what in ("time", "memory"):
            plain[f"{name}_{what}_vs_best_peer"] = figures[f"{name}_fast_{what}_vs_best_peer"]
    return plain


def key(name: str, method: str) -> str:
    return f"{name}_{method.replace(', ', '_')}"


def error(grads: Grads, expected: Grads) -> float | None:
    """Return the largest relative error in any parameter's learning rate."""
    if not grads:
        return None
    found, wanted = torch.stack([grads[k] for k in expected]), torch.stack(list(expected.values()))
    return torch.where(found == wanted, 0, (found - wanted).abs() / wanted.abs()).max().item()


def show(config: Config, name: str, result: Result, figures: Summary) -> None:
    columns = {
        "ms": ("ms", ".0f"),
        "over peer": ("time_vs_best_peer", ".2f"),
        "over training": ("time_vs_training", ".2f"),
        "tensor MiB": ("mib", ".1f"),
        "process MiB": ("resident_mib", ".1f"),
        "error": ("error", ".0e"),
        "compile s": ("compile_seconds", ".1f"),
    }

    def cell(method: str, figure: str, form: str) -> str:
        value = figures.get(f"{key(name, method)}_{figure}")
        return "" if value is None else format(value, form)

    rows = [[method, *(cell(method, *column) for column in columns.values())] for method in result.seconds]
    title = f"{name.replace('_t', ', T = ')}; best peer: {figures[f'{name}_best_peer_time']} in time, "
    show_table(
        config.out, title + f"{figures[f'{name}_best_peer_memory']} in memory", ["way", *columns], rows
    )


def draw(config: Config, results: dict[str, Result], figures: Summary) -> None:
    """Draw time and memory of each method over the best peer's."""
    figure = Figure(figsize=(3.4 * len(results) + 1, 6), layout="constrained")
    panels = figure.subplots(2, len(results), squeeze=False)
    for row, measure in zip(panels, ("time", "memory"), strict=True):
        for axes, (name, result) in zip(row, results.items(), strict=True):
            over = {
                method: figures[f"{key(name, method)}_{measure}_vs_best_peer"]
                for method in reversed(result.seconds)
            }
            colors = [COLORS.get(method, "#0072b2") for method in over]
            bars = axes.barh(list(over), list(over.values()), color=colors)
            axes.bar_label(bars, fmt="%.2f" if measure == "time" else "%.3f", padding=2)
            axes.axvline(1, color="#d55e00", linewidth=0.8, linestyle=":", zorder=0)
            axes.margins(x=0.2)
            axes.set_title(name.replace("_t", ", T = "))
            axes.set_xlabel(f"{measure} over the best peer's")
            if axes is not row[0]:
                axes.set_yticklabels([])
    figure.savefig(config.out / "unroll.png", dpi=150)


def log(config: Config, results: dict[str, Result], figures: Summary) -> None:
    with Logger(config.out) as logger:
        for name, result in results.items():
            for method, seconds in result.seconds.items():
                for i, took in enumerate(seconds):
                    logger.info(i, {f"{name}/{method}": torch.tensor(took)})
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
