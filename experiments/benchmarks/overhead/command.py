"""What FOP adds to the time of a training step: over the optimizer around which it is, and against others."""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from experiments.benchmarks.overhead import report
from experiments.benchmarks.overhead.config import Config, nets
from experiments.benchmarks.overhead.measure import CLOCKS, WARMUP, Memory, Net, measure, memory_of, overheads
from experiments.benchmarks.overhead.report import Result
from experiments.measuring.isolation import isolated
from experiments.reporting.summary import write_summary
from experiments.runner import experiment
from experiments.runner.progress import progress

__all__ = ["Config", "main"]


def main(config: Config) -> None:
    if config.repeats < 2 or config.periods < 1:
        sys.exit(
            "bench-overhead takes --repeats of 2 or more, for intervals, and --periods of 1 or more, "
            f"got {config.repeats} and {config.periods}."
        )
    generator = experiment.begin(config)
    torch.manual_seed(config.seed)  # nn.Module draws its first weights from the global generator
    chosen = {name: net for name, net in nets(config).items() if name in config.nets}
    results: dict[str, Result] = {}
    ticks = sum(WARMUP + net.rounds + config.memory * len(net.methods) for net in chosen.values())
    with progress(ticks) as tick:
        for name, net in chosen.items():
            begin = time.perf_counter(), time.process_time()
            times = measure(net, config.batch, CLOCKS[config.clock], generator, partial(tick, name))
            share = (time.process_time() - begin[1]) / (time.perf_counter() - begin[0])
            memory = memories(net, partial(tick, f"{name}, memory")) if config.memory else {}
            results[name] = Result(times, overheads(net, times, generator), memory, share)
    figures = report.figures_of(config, results)
    for name, result in results.items():
        report.show(config, name, result)
    report.draw(config, results)
    report.log(config, results, figures)
    write_summary(config.out, figures)


def memories(net: Net, tick: Callable[[], None]) -> dict[str, Memory]:
    """Return the memory of each optimizer, found in a process of its own in which nothing was held before."""
    preload, found = [Net.__module__], {}
    with patch.dict(os.environ, KINETO_LOG_LEVEL="99"):  # silences torch's profiler
        for method in net.methods:
            found[method] = isolated(preload, memory_of, net, method)
            tick()
    return found
