"""The time of the derivative through T steps, over that of a step; and the memory that it keeps."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Generator

from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.studies.compare import horizons
from experiments.studies.compare.digits import Digits
from experiments.studies.compare.horizons import Horizons
from metafop import Adam, Online, tree
from metafop.hypergradients import adjoint


class Case(NamedTuple):
    """What to call, how many steps that is, and the bytes that it keeps."""

    call: Callable[[], Any]
    steps: int
    kept: int


def cases(settings: Horizons, digits: Digits, generator: Generator) -> dict[str, Case]:
    """Return a training step, an online step, and the derivative through each T."""
    training, metas = horizons.trainer(settings, digits)
    meta, carry = tree.map(lambda x: x[0], metas), training.init(digits.take(torch.tensor(0)))
    online = Online(training, Adam(), ("precond", "lr", "momentum"))
    outer_meta = online.init_meta(meta, lr=1e-3)
    batches = list(digits.draw((max(settings.steps), settings.batch), generator))
    state, _ = online.step(outer_meta, online.init(meta, carry), batches[0])
    extra = tree.size(state) - tree.size(carry)
    found = {
        "a training step": Case(lambda: training.step(meta, carry, batches[0]), 1, 0),
        "an online step": Case(lambda: online.step(outer_meta, state, batches[0]), 1, extra),
    }
    for steps in settings.steps:
        found[f"T = {steps}"] = Case(
            lambda steps=steps: adjoint(training, digits.validation, meta, carry, batches[:steps]),
            steps,
            steps * tree.size(carry),
        )
    return found


def measure(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each case in each round; one more round, the first, warms up and is left out."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(1 + rounds):
        for name, case in cases.items():
            calls = max(20 // case.steps, 1)  # short times are noisy
            begin = time.perf_counter()
            for _ in range(calls):
                case.call()
            times[name].append((time.perf_counter() - begin) / calls)
    return {name: seconds[1:] for name, seconds in times.items()}


def report(settings: Horizons, rounds: int, digits: Digits, generator: Generator, out: Path) -> Summary:
    """Measure, print a table, and return the figures."""
    compared = cases(settings, digits, generator)
    times = measure(compared, rounds)
    rows, figures = [], {}
    for name, seconds in times.items():
        plain, learned = (
            median(s / t for s, t in zip(seconds, times[other], strict=True))
            for other in ("a training step", "an online step")
        )
        kept = f"{compared[name].kept / 1e3:,.0f}"
        rows.append([name, f"{1e3 * median(seconds):.1f}", f"{plain:.1f}", f"{learned:.1f}", kept])
        if name.startswith("T"):
            figures[f"t{name[4:]}_over_training_step"] = round(plain, 2)
            figures[f"t{name[4:]}_over_online_step"] = round(learned, 2)
    columns = ["", "ms", "over a training step", "over an online step", "kB kept"]
    show_table(out, "What the derivative through T steps takes", columns, rows)
    return figures
