"""The tables and the figures of maml."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from experiments.measuring.timing import ratio
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.studies.maml.cost import Cost
from experiments.studies.maml.learning import RECIPES, Adapted, Learned
from metafop import tree
from metafop.tensorboard import Logger

MIB = 2**20
REPORTED = (0, 1, 5, 10)  # steps of adapting


def of_learning(out: Path, learned: Mapping[str, Learned], adapted: Mapping[str, Adapted]) -> Summary:
    """Show the error on unseen tasks after each number of steps: the mean, and its 95 % interval."""
    rows, figures = [], {}
    most, count = next(iter(adapted.values())).errors.shape
    steps = [step for step in REPORTED if step < most]
    for name, found in adapted.items():
        row = [RECIPES[name].label]
        for step in steps:
            mean, within = mean_and_interval(found.errors[step])
            figures |= {f"{name}_error_{step}": round(mean, 4), f"{name}_within_{step}": round(within, 4)}
            row.append(f"{mean:.3f} ± {within:.3f}")
        rows.append(row)
    show_table(
        out,
        f"Squared error on {count} unseen tasks after so many steps on ten points: the mean, and half of its "
        "95 % interval",
        ["what is learned", *(f"{step} step{'s' * (step != 1)}" for step in steps)],
        rows,
    )
    rates = tree.named(learned["rates1"].meta.hyper.lr)
    show_table(
        out,
        "The rates that were learned with the start, from 0.01 each",
        ["tensor", "rate"],
        [[name, f"{rate.item():.2g}"] for name, rate in rates.items()],
    )
    figures |= {f"rate_{name}": float(f"{rate.item():.3g}") for name, rate in rates.items()}
    others = [rate.item() for name, rate in rates.items() if not name.startswith("0.")]
    # The first recipe is the first to be compiled.
    first = next(iter(learned.values())).seconds
    return figures | {
        "rates_of_other_layers": max(others),
        "build_seconds": round(first[0] - median(first), 1),
    }


def mean_and_interval(errors: Tensor) -> tuple[float, float]:
    return errors.mean().item(), 1.96 * (errors.std() / len(errors) ** 0.5).item()


def of_cost(out: Path, steps: int, cost: Cost) -> Summary:
    """Show what a meta step takes in every way, over higher's, and how far the numbers are from its own."""
    figures, rows = {}, []
    theirs = cost.memory["higher"]
    for name, seconds in cost.seconds.items():
        memory, key = cost.memory[name], f"t{steps}_{key_of(name)}"
        own = {
            "ms": round(1e3 * median(seconds), 2),
            "time_vs_higher": ratio(seconds, cost.seconds["higher"]),
            "mib": round(memory.tensors / MIB, 3),
            "memory_vs_higher": round(memory.tensors / theirs.tensors, 3),
            "curve_error": curve_error(cost, name),
        }
        row = [name, f"{own['ms']:.1f}", f"{own['time_vs_higher']:.3f}", f"{own['mib']:.2f}"]
        row.append(f"{own['memory_vs_higher']:.2f}")
        if memory.resident is not None:
            own["resident_mib"] = round(memory.resident / MIB, 2)
        if name != "higher":
            own["gradient_error"] = cost.errors[name]
        row.append(f"{own['resident_mib']:.1f}" if "resident_mib" in own else "")
        row += [f"{own['gradient_error']:.0e}", f"{own['curve_error']:.0e}"] if name != "higher" else ["", ""]
        rows.append(row)
        figures |= {f"{key}_{figure}": value for figure, value in own.items()}
    show_table(
        out,
        f"A meta step through {steps} step{'s' * (steps > 1)}: time, memory at the peak, and over higher's; "
        "the relative distance from higher's meta-gradient in float64, and from its losses in float32, the "
        f"largest over {len(cost.losses['higher'])} meta steps",
        ["way", "ms", "time", "tensor MiB", "memory", "process MiB", "gradient", "losses"],
        rows,
    )
    return figures


def largest_errors(costs: Mapping[int, Cost]) -> Summary:
    """Return the largest distances from higher, of all ways and numbers of steps."""
    gradients = [error for cost in costs.values() for error in cost.errors.values()]
    curves = [curve_error(cost, name) for cost in costs.values() for name in cost.losses]
    return {"largest_gradient_error": max(gradients), "largest_curve_error": max(curves)}


def curve_error(cost: Cost, name: str) -> float:
    """Return the largest relative difference of the losses of the meta steps from higher's."""
    wanted = cost.losses["higher"]
    return ((cost.losses[name] - wanted).abs() / wanted).max().item()


def key_of(way: str) -> str:
    return way.replace(", ", "_").replace(" ", "_").replace(".", "_")


def log(
    logger: Logger,
    learned: Mapping[str, Learned],
    adapted: Mapping[str, Adapted],
    costs: Mapping[int, Cost],
) -> None:
    for name, found in learned.items():
        for step, loss in enumerate(found.losses):
            logger.info(step, {f"loss/{name}": loss})
        for step, errors in enumerate(adapted[name].errors):
            logger.info(step, {f"unseen/{name}": errors.mean()})
    for steps, cost in costs.items():
        for way, losses in cost.losses.items():
            for step, loss in enumerate(losses):
                logger.info(step, {f"ways, {steps} steps/{way}": loss})
        for way, seconds in cost.seconds.items():
            for i, took in enumerate(seconds):
                logger.info(i, {f"seconds, {steps} steps/{way}": torch.tensor(took)})
