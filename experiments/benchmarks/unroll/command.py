"""What a hypergradient through many steps costs in time and memory: ours, the peers', and training alone."""

import time
from functools import partial

from experiments.benchmarks.unroll import check_costs, headline, leaf_costs, long_horizons, report
from experiments.benchmarks.unroll.config import Config, cases, small
from experiments.benchmarks.unroll.measure import (
    Result,
    alone,
    longer,
    measure,
    reversible_memory,
)
from experiments.benchmarks.unroll.methods import METHODS, PEERS, Case
from experiments.measuring.cold_start import cold_start
from experiments.measuring.timing import take_turns
from experiments.reporting.summary import Summary, write_summary
from experiments.runner import experiment
from experiments.runner.extras import require
from experiments.runner.progress import progress

__all__ = ["Config", "main"]


def main(config: Config) -> None:
    wanted = parts(config)
    if "ways" in wanted:
        require("bench-unroll", dict.fromkeys(PEERS, "peers"))
    experiment.begin(config)
    results: dict[str, Result] = {}
    figures: Summary = {}
    with cold_start(), progress(sum(wanted.values())) as tick:
        if "checks" in wanted:
            figures |= checks(config)
            tick("checks")
        if "leaves" in wanted:
            figures |= leaves(config)
            tick("leaves")
        if "ways" in wanted:
            for name, case in chosen(config).items():
                results[f"{name}_t{case.horizon}"] = measure(config, name, tick)
        if "ways" in wanted and not config.nets:
            figures |= longer(config)
            tick("longer")
            figures |= alone(config, reversible_memory)
            tick("reversible")
        if "long horizons" in wanted:
            figures |= long_horizons.costs(config, tick)
    if "checks" in wanted:
        check_costs.show(config.out, figures)
    if "leaves" in wanted:
        leaf_costs.show(config.out, figures)
    if "long horizons" in wanted:
        long_horizons.show(config, figures)
    for name, result in results.items():
        figures |= report.figures_of(name, result)
        figures[f"{name.split('_')[0]}_time_vs_plain_training"] = figures[f"{name}_fast_time_vs_training"]
        report.show(config, name, result, figures)
    if results:
        report.draw(config, results, figures)
    if f"cnn_t{config.horizon}" in results:
        headline.draw(config.out / "headline.png", f"cnn_t{config.horizon}", figures)
    report.log(config, results, figures)
    write_summary(config.out, figures)


def chosen(config: Config) -> dict[str, Case]:
    """Return the cases of the nets that are to be measured."""
    return {name: case for name, case in cases(config).items() if not config.nets or name in config.nets}


def parts(config: Config) -> dict[str, int]:
    """Return the parts to measure, each with the number of times that it moves the progress bar."""
    counts = {
        "checks": 1,
        "leaves": 1,
        "ways": sum(len(METHODS) * (case.rounds + 2) for case in chosen(config).values()) + 2,
        "long horizons": len(long_horizons.WAYS) * (small(config).rounds + 1),
    }
    if config.nets:
        return {"ways": counts["ways"]}
    if config.only_leaves:
        return {"leaves": counts["leaves"]}
    if config.only_long_horizons:
        return {"long horizons": counts["long horizons"]}
    return counts if config.ways else {"checks": counts["checks"]}


def checks(config: Config) -> Summary:
    return check_costs.costs(shallow(config), config.checked, config.seed, config.compiled, turns)


def leaves(config: Config) -> Summary:
    return leaf_costs.costs(shallow(config), config.horizon, config.seed, config.compiled, turns)


def shallow(config: Config) -> dict[str, Case]:
    return {name: case for name, case in cases(config).items() if name != "deep"}


# By the processor's clock: other programs disturb the wall clock by more than the percent to measure.
turns = partial(take_turns, tick=lambda: None, clock=time.process_time)
