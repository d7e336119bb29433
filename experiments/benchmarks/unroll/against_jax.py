"""Ours against JAX: compiled each, in turns in one process, on as many cores; and what each process takes."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from experiments.benchmarks.unroll.cases import Unroll
from experiments.benchmarks.unroll.config import Config, jax_cases
from experiments.benchmarks.unroll.measure import alone
from experiments.benchmarks.unroll.methods import methods
from experiments.benchmarks.unroll.peers import Grads, by_loop
from experiments.benchmarks.unroll.report import MIB, error, key
from experiments.measuring.cores import stay_on
from experiments.measuring.memory import peak_resident
from experiments.measuring.timing import ratio, take_turns
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table

JAX = ("jax", "jax, checkpointed")
LABELS = {"fast": "fast, beside_jax"} | dict(zip(JAX, JAX, strict=True))  # fast is measured elsewhere too


class Timed(NamedTuple):
    """The seconds of each way in each round, and its largest relative error against the loop."""

    seconds: dict[str, list[float]]
    errors: dict[str, float | None]


def costs(config: Config, tick: Callable[[str], None]) -> Summary:
    """Return time and memory of each way, "vs_jax" against the way by JAX that is better in just that."""
    figures: Summary = {}
    for net, case in jax_cases(config).items():
        name = f"{net}_t{case.horizon}"
        timed: Timed = alone(config, timed_in_turns, net)
        tick(f"{net}, JAX")
        quick = min(JAX, key=lambda way: median(timed.seconds[way]))
        figures[f"{name}_best_jax"] = quick
        for way, seconds in timed.seconds.items():
            figures |= {
                f"{key(name, way)}_time_vs_jax": ratio(seconds, timed.seconds[quick]),
                f"{key(name, LABELS[way])}_ms": round(1e3 * median(seconds), 2),
                f"{key(name, LABELS[way])}_error": timed.errors[way],
            }
        if config.isolated:
            figures |= _memory(config, net, name, tick)
    return figures


def _memory(config: Config, net: str, name: str, tick: Callable[[str], None]) -> Summary:
    found: dict[str, int] = {}
    for way in LABELS:
        peak = alone(config, resident, net, way)
        tick(f"{net}, JAX, memory")
        if peak is not None:
            found[way] = peak
    return {f"{key(name, LABELS[way])}_resident_mib": round(peak / MIB, 2) for way, peak in found.items()}


def timed_in_turns(config: Config, net: str) -> Timed:
    runs, unroll, rounds = _runs(config, net)
    expected = by_loop(unroll, unroll.batches)
    errors = {way: error(run(), expected) for way, run in runs.items()}  # and all is compiled
    return Timed(take_turns(runs, rounds, lambda: None), errors)


def resident(config: Config, net: str, way: str) -> int | None:
    """Return the bytes of the whole process at the peak, above those before."""
    runs, _, _ = _runs(config, net)
    runs[way]()
    return peak_resident(runs[way])


def _runs(config: Config, net: str) -> tuple[dict[str, Callable[[], Grads]], Unroll, int]:
    """Return each way by its name, where they all start from, and how many rounds to take."""
    torch.set_num_threads(config.threads)
    if config.isolated:
        stay_on(config.threads)
    from experiments.benchmarks.unroll.by_jax import jax_methods  # an extra, which this part alone needs

    case = jax_cases(config)[net]
    unroll = case.unroll(config.seed)
    fast = partial(methods(unroll, config.compiled)["fast"], unroll.batches)
    return {"fast": fast, **jax_methods(unroll)}, unroll, case.rounds


def show(config: Config, figures: Summary) -> None:
    for net, case in jax_cases(config).items():
        name = f"{net}_t{case.horizon}"
        rows = [[way, *_cells(figures, key(name, way), key(name, LABELS[way]))] for way in LABELS]
        title = f"Against JAX: {net}, T = {case.horizon}; its faster way: {figures[f'{name}_best_jax']}"
        show_table(config.out, title, ["way", "ms", "over JAX", "process MiB", "error"], rows)


def _cells(figures: Summary, way: str, label: str) -> list[str]:
    forms = {
        f"{label}_ms": ".0f",
        f"{way}_time_vs_jax": ".2f",
        f"{label}_resident_mib": ".1f",
        f"{label}_error": ".0e",
    }
    return [format(figures[figure], form) if figure in figures else "" for figure, form in forms.items()]
