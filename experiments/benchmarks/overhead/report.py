"""The figures, the tables and the picture of bench-overhead."""

from dataclasses import asdict
from statistics import median
from typing import Literal, NamedTuple

import torch
from matplotlib.figure import Figure

from experiments.benchmarks.overhead.config import CANNOT, Config
from experiments.benchmarks.overhead.measure import Memory, Overhead, Times
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from metafop.tensorboard import Logger

COLORS = {
    **dict.fromkeys(("fop", "rank4"), "#0072b2"),
    "rank64": "#56b4e9",
    "rank4_every_step": "#004166",
    "rank64_every_step": "#8ab6d6",
    "paper": "#009e73",
    "sgd_fused": "#cccccc",
    "adam": "#999999",
    "muon": "#f0e442",
    "soap": "#e69f00",
    "shampoo_every_10th": "#d55e00",
    "shampoo": "#a63d00",
}


class Result(NamedTuple):
    """What was found of each optimizer on a net."""

    times: dict[str, Times]
    overhead: dict[str, Overhead]
    memory: dict[str, Memory]
    cpu_share: float  # time on a processor, over the time that passed: below 1 if others took the machine


def key(name: str, method: str) -> str:
    return name if method == "fop" else f"{name}_{method}"


def figures_of(config: Config, results: dict[str, Result]) -> Summary:
    """Return the headlines, None where not measured, then every figure of every optimizer on every net."""
    rest: Summary = {}
    for name, result in results.items():
        memory = result.memory
        rest[f"{name}_cpu_share"] = round(result.cpu_share, 4)
        rest[f"{name}_forward_backward_ms"] = round(1e3 * passes(result), 4)
        for method, found in result.overhead.items():
            rest[f"{name}_{method}_step_ms"] = round(1e3 * found.seconds, 4)
            if method != "sgd":
                rest[f"{key(name, method)}_overhead_percent"] = round(found.percent, 4)
                rest[f"{key(name, method)}_overhead_percent_low"] = round(found.low, 4)
                rest[f"{key(name, method)}_overhead_percent_high"] = round(found.high, 4)
        for method in [method for method in memory if method != "sgd"]:
            rest[f"{key(name, method)}_extra_memory_over_base"] = extra(memory, method, "state")
            rest[f"{key(name, method)}_extra_held_over_base"] = extra(memory, method, "held")
            rest[f"{key(name, method)}_extra_peak_over_base"] = extra(memory, method, "peak")
        if config.peers and name != "mlp":
            rest |= {f"{key(name, method)}_overhead_percent": None for method in CANNOT}
    if "mlp_rank4_extra_memory_over_base" in rest:
        rest["mlp_extra_memory_over_base"] = rest["mlp_rank4_extra_memory_over_base"]
    headlines = ["cnn9_16_32", "cnn9_96_192", "mlp_rank4", "mlp_rank64"]
    figures = {f"{name}_overhead_percent": rest.get(f"{name}_overhead_percent") for name in headlines}
    small = results["cnn9_16_32"].overhead if "cnn9_16_32" in results else {}
    soap = small["fop"].percent / small["soap"].percent if "soap" in small else None
    figures["cnn9_overhead_vs_soap"] = None if soap is None else round(soap, 4)
    figures["extra_memory_over_base"] = rest.get("cnn9_16_32_extra_memory_over_base")
    return figures | rest


def passes(result: Result) -> float:
    """Return the seconds of forward and backward."""
    return median(t for times in result.times.values() for t in times.passes)


def extra(memory: dict[str, Memory], method: str, what: Literal["state", "held", "peak"]) -> float:
    """Return how much more there is than with SGD, over the size of the parameters."""
    more = getattr(memory[method], what) - getattr(memory["sgd"], what)
    return round(more / memory["sgd"].params, 4)


def show(config: Config, name: str, result: Result) -> None:
    columns = ["optimizer", "step ms", "over %", "from", "to", "steps"]
    columns += ["state", "held", "peak"] if result.memory else []
    rows = []
    for method, found in result.overhead.items():
        row = [method.replace("_", " "), f"{1e3 * found.seconds:.3f}"]
        row += [f"{x:.{3 if abs(x) < 10 else 1}f}" for x in (found.percent, found.low, found.high)]
        row.append(str(len(result.times[method].steps)))
        if result.memory:
            row += [f"{extra(result.memory, method, what):.3f}" for what in ("state", "held", "peak")]
        rows.append(row)
    title = (
        f"{name}: forward and backward take {1e3 * passes(result):.2f} ms. Over: extra time, in percent of a "
        "step with SGD, and its 95 % interval. Beyond SGD's, in sizes of the parameters: the optimizer's "
        "state; all that is held between steps; the peak. "
        f"The process had a processor for {100 * result.cpu_share:.0f} % of the time"
    )
    if config.peers and name != "mlp":
        rows += [[method, *["none"] * (len(columns) - 1)] for method in CANNOT]
        title += "".join(f". {method} {why}" for method, why in CANNOT.items())
    show_table(config.out, title, columns, rows)


def draw(config: Config, results: dict[str, Result]) -> None:
    """Draw each overhead with its interval; one that is not above zero has no bar on a logarithmic axis."""
    figure = Figure(figsize=(4.2 * len(results), 3.6), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, result) in zip(panels, results.items(), strict=True):
        found = {method: o for method, o in reversed(result.overhead.items()) if method != "sgd"}
        least = 0.5 * min([o.percent for o in found.values() if o.percent > 0], default=1.0)
        most = max(least, *(o.high for o in found.values()))
        for i, (method, o) in enumerate(found.items()):
            label = f"{o.percent:.2g}" if abs(o.percent) < 10 else f"{o.percent:.0f}"
            if o.percent > 0:
                axes.barh(i, o.percent - least, left=least, color=COLORS[method])
                axes.hlines(i, max(o.low, least), max(o.high, least), color="black", linewidth=1)
            axes.text(1.15 * max(o.percent, o.high, least), i, label, va="center", fontsize=8)
        axes.set_xscale("log")
        axes.set_xlim(least, 8 * most)
        axes.set_yticks(range(len(found)), [method.replace("_", " ") for method in found])
        axes.set_xlabel("extra time per step (% of SGD's)")
        axes.set_title(name)
    panels[0].set_ylabel("optimizer")
    figure.savefig(config.out / "overhead.png", dpi=150)


def log(config: Config, results: dict[str, Result], figures: Summary) -> None:
    with Logger(config.out) as logger:
        for name, result in results.items():
            for method, times in result.times.items():
                for i, took in enumerate(times.steps):
                    logger.info(i, {f"{name}/{method}": torch.tensor(took)})
        settings = asdict(config) | {"nets": " ".join(config.nets)}
        logger.hyperparameters(settings, {k: v for k, v in figures.items() if isinstance(v, float)})
