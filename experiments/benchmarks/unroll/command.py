"""What a hypergradient through many steps costs in time and memory: ours, the peers', and training alone."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from experiments.benchmarks.unroll import (
    against_jax,
    check_costs,
    compile_times,
    headline,
    leaf_costs,
    long_horizons,
    report,
)
from experiments.benchmarks.unroll.cases import Case
from experiments.benchmarks.unroll.config import Config, cases, chosen, compiled_cases, jax_cases, small
from experiments.benchmarks.unroll.measure import Result, alone, longer, measure, reversible_memory
from experiments.benchmarks.unroll.methods import METHODS, PEERS
from experiments.measuring.cold_start import cold_start
from experiments.measuring.timing import take_turns
from experiments.reporting.summary import Summary, write_summary
from experiments.runner import experiment
from experiments.runner.extras import require
from experiments.runner.progress import progress

__all__ = ["Config", "main"]

Tick = Callable[[str], None]


class Part(NamedTuple):
    """Something that is measured besides the ways of METHODS, and how it is shown."""

    costs: Callable[[Config, Tick], Summary]
    show: Callable[[Config, Summary], None]


def main(config: Config) -> None:
    wanted = parts(config)
    require("bench-unroll", extras(wanted))
    experiment.begin(config)
    others = [part for name, part in PARTS.items() if name in wanted]
    results: dict[str, Result] = {}
    figures: Summary = {}
    with cold_start(), progress(sum(wanted.values())) as tick:
        if "ways" in wanted:  # first: they tell how long compiling took, with nothing built before
            for name, case in chosen(config).items():
                results[f"{name}_t{case.horizon}"] = measure(config, name, tick)
        if "ways" in wanted and not config.nets:
            figures |= longer(config)
            tick("longer")
            figures |= alone(config, reversible_memory)
            tick("reversible")
        for part in others:
            figures |= part.costs(config, tick)
    for part in others:
        part.show(config, figures)
    for name, result in results.items():
        figures |= report.figures_of(name, result)
        report.show(config, name, result, figures)
    if results:
        report.draw(config, results, figures)
    if f"cnn_t{config.horizon}" in results:
        headline.draw(config.out / "headline.png", f"cnn_t{config.horizon}", figures)
    report.log(config, results, figures)
    write_summary(config.out, figures)


def parts(config: Config) -> dict[str, int]:
    """Return the parts to measure, each with the number of times that it moves the progress bar."""
    memories = len(against_jax.LABELS) if config.isolated else 0
    counts = {
        "checks": 1,
        "leaves": 1,
        "long horizons": len(long_horizons.WAYS) * (small(config).rounds + 1),
        "jax": len(jax_cases(config)) * (1 + memories),
        "compiling": sum(compile_times.PROCESSES * case.rounds for case in compiled_cases(config).values()),
        "ways": sum(len(METHODS) * (case.rounds + 2) for case in chosen(config).values()) + 2,
    }
    only = {
        "leaves": config.only_leaves,
        "long horizons": config.only_long_horizons,
        "jax": config.only_jax,
        "compiling": config.only_compiling,
    }
    if any(only.values()):
        asked = [name for name, alone in only.items() if alone]
    elif config.nets or not config.ways:
        asked = ["ways" if config.nets else "checks"]
    else:
        left_out = {"jax": not config.jax, "compiling": not (config.jax and config.compiled)}
        asked = [name for name in counts if not left_out.get(name)]
    return {name: counts[name] for name in asked}


def extras(wanted: Iterable[str]) -> dict[str, str]:
    """Return the packages that these parts need, each with the extra that installs it."""
    needed = {"ways": dict.fromkeys(PEERS, "peers"), "jax": {"jax": "jax"}, "compiling": {"jax": "jax"}}
    return {package: extra for part in wanted for package, extra in needed.get(part, {}).items()}


def checks(config: Config, tick: Tick) -> Summary:
    figures = check_costs.costs(shallow(config), config.checked, config.seed, config.compiled, turns)
    tick("checks")
    return figures


def leaves(config: Config, tick: Tick) -> Summary:
    figures = leaf_costs.costs(shallow(config), config.horizon, config.seed, config.compiled, turns)
    tick("leaves")
    return figures


def shallow(config: Config) -> dict[str, Case]:
    return {name: case for name, case in cases(config).items() if name in ("mlp", "cnn")}


# By the processor's clock: other programs disturb the wall clock by more than the percent to measure.
turns = partial(take_turns, tick=lambda: None, clock=time.process_time)
PARTS = {
    "checks": Part(checks, check_costs.show),
    "leaves": Part(leaves, leaf_costs.show),
    "long horizons": Part(long_horizons.costs, long_horizons.show),
    "jax": Part(against_jax.costs, against_jax.show),
    "compiling": Part(compile_times.costs, compile_times.show),
}
