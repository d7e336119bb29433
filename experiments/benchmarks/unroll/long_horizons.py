"""Which way to take for a long horizon: the time and memory of each, not compiled, on a small net."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from experiments.benchmarks.unroll.cases import Batch, Unroll
from experiments.benchmarks.unroll.config import Config, small
from experiments.benchmarks.unroll.measure import WARMUP, alone
from experiments.benchmarks.unroll.methods import estimates
from experiments.measuring.memory import peak_of_tensors
from experiments.measuring.timing import ratio, take_turns
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from metafop import Estimate, Momentum, ReversibleMomentum
from metafop.hypergradients import Adjoint, Forward, reversible
from metafop.protocols import Estimator


class Way(NamedTuple):
    """An estimator, and the optimizer of the training that it is given."""

    estimator: Estimator
    optimizer: Momentum | ReversibleMomentum


class Found(NamedTuple):
    """Bytes of tensors at the peak, above those before; and the derivative in the one number of all ways."""

    peak: int
    derivative: float  # in momentum


WAYS = {
    "all": Way(Adjoint(keep="all"), Momentum()),
    "sqrt": Way(Adjoint(keep="sqrt"), Momentum()),
    "log": Way(Adjoint(keep="log"), Momentum()),
    "reversible": Way(reversible, ReversibleMomentum()),
    "forward": Way(Forward(learn=("momentum",)), Momentum()),
}


def costs(config: Config, tick: Callable[[str], None]) -> Summary:
    """Return the seconds and MiB of each way, and its relative error against `keep="all"`."""
    case = small(config)
    unroll = case.unroll(config.seed)
    runs = {name: partial(_warm(unroll, way), unroll.batches) for name, way in WAYS.items()}
    # By the processor's clock: over minutes, other programs disturb the wall clock by more than ways differ.
    seconds = take_turns(runs, case.rounds, lambda: tick("long horizons"), time.process_time)
    found = {}
    for name in WAYS:
        found[name] = alone(config, found_by, name)
        tick("long horizons, memory")
    figures: Summary = {}
    for name in WAYS:
        figures |= {
            f"{_key(config, name)}_seconds": round(median(seconds[name]), 2),
            f"{_key(config, name)}_time_vs_all": ratio(seconds[name], seconds["all"]),
            f"{_key(config, name)}_mib": round(found[name].peak / 2**20, 2),
            f"{_key(config, name)}_error": abs(found[name].derivative / found["all"].derivative - 1),
        }
    return figures


def found_by(config: Config, name: str) -> Found:
    torch.set_num_threads(config.threads)
    unroll = small(config).unroll(config.seed)
    estimate = _warm(unroll, WAYS[name])
    made: list[Estimate] = []
    peak = peak_of_tensors(lambda batches: made.append(estimate(batches)), unroll.batches)
    return Found(peak, made[0].grads.hyper.momentum.item())


def show(config: Config, figures: Summary) -> None:
    columns = {
        "s": ("seconds", ".1f"),
        "over all": ("time_vs_all", ".2f"),
        "tensor MiB": ("mib", ".1f"),
        "error": ("error", ".0e"),
    }

    def cell(name: str, figure: str, form: str) -> str:
        return format(figures[f"{_key(config, name)}_{figure}"], form)

    rows = [[name, *(cell(name, *column) for column in columns.values())] for name in WAYS]
    show_table(config.out, f"Long horizons: small, T = {config.small_horizon}", ["way", *columns], rows)


def _warm(unroll: Unroll, way: Way) -> Callable[[Sequence[Batch]], Estimate]:
    """Return a function from batches to an estimate, which has been called for a few steps."""
    estimate = partial(estimates(unroll, way.optimizer), way.estimator)
    estimate(unroll.batches[:WARMUP])
    return estimate


def _key(config: Config, name: str) -> str:
    return f"small_t{config.small_horizon}_{name}"
