"""What a hypergradient through many steps costs in time and memory: ours, the peers', and training alone."""

import time
from functools import partial

from experiments.benchmarks.timing import take_turns
from experiments.benchmarks.unroll import check_costs, report
from experiments.benchmarks.unroll.config import Config, cases
from experiments.benchmarks.unroll.measure import (
    Result,
    alone,
    cold_start,
    longer,
    measure,
    reversible_memory,
)
from experiments.benchmarks.unroll.methods import METHODS, PEERS
from experiments.reporting.summary import write_summary
from experiments.runner import experiment
from experiments.runner.extras import require
from experiments.runner.progress import progress

__all__ = ["Config", "main"]


def main(config: Config) -> None:
    require("bench-unroll", dict.fromkeys(PEERS, "peers"))
    experiment.begin(config)
    results: dict[str, Result] = {}
    runs = sum(len(METHODS) * (case.rounds + 2) for case in cases(config).values())
    with cold_start(), progress(runs + 3 if config.ways else 1) as tick:
        checked = {name: case for name, case in cases(config).items() if name != "deep"}
        # By the processor's clock: other programs disturb the wall clock by more than the percent to measure.
        turns = partial(take_turns, tick=lambda: None, clock=time.process_time)
        figures = check_costs.costs(checked, config.checked, config.seed, config.compiled, turns)
        tick("checks")
        if config.ways:
            for name, case in cases(config).items():
                results[f"{name}_t{case.horizon}"] = measure(config, name, tick)
            figures |= longer(config)
            tick("longer")
            figures |= alone(config, reversible_memory)
            tick("reversible")
    check_costs.show(config.out, figures)
    for name, result in results.items():
        figures |= report.figures_of(name, result)
        figures[f"{name.split('_')[0]}_time_vs_plain_training"] = figures[f"{name}_fast_time_vs_training"]
        report.show(config, name, result, figures)
    if results:
        report.draw(config, results, figures)
    report.log(config, results, figures)
    write_summary(config.out, figures)
