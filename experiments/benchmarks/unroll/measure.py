"""Time and peak memory of each method on each network; memory in a process of its own."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.unroll.cases import CLASSES, Case, images
from experiments.benchmarks.unroll.config import Config, cases
from experiments.benchmarks.unroll.methods import COMPILED, PEERS, estimates, methods
from experiments.benchmarks.unroll.peers import Grads
from experiments.measuring.isolation import isolated
from experiments.measuring.memory import peak_of_tensors, peak_resident
from experiments.measuring.timing import ratio, take_turns
from experiments.reporting.summary import Summary
from experiments.vision import models
from metafop import Estimate, ReversibleMomentum
from metafop.hypergradients import reversible

WARMUP = 3  # steps, after which everything is compiled


class Memory(NamedTuple):
    """Bytes at the peak, above those before: of tensors, and of the whole process where that can be known."""

    tensors: int
    resident: int | None


class Result(NamedTuple):
    """What was found, of each method."""

    seconds: dict[str, list[float]]
    compiling: dict[str, float]  # seconds of the first steps, where these compile what no method before has
    grads: dict[str, Grads]
    memory: dict[str, Memory]


def measure(config: Config, name: str, tick: Callable[[str], None]) -> Result:
    case = cases(config)[name]
    unroll = case.unroll(config.seed)
    compiling, grads, runs = {}, {}, {}
    for method, function in methods(unroll, config.compiled).items():
        begin = time.perf_counter()
        function(unroll.batches[:WARMUP])
        if config.compiled and method in COMPILED:
            compiling[method] = time.perf_counter() - begin
        runs[method] = lambda function=function: function(unroll.batches)
        grads[method] = runs[method]()
        tick(f"{name}, warming up")
    seconds = take_turns(runs, case.rounds, lambda: tick(name))
    memory = {}
    for method in runs:
        memory[method] = alone(config, memory_of, name, method)
        tick(f"{name}, memory")
    return Result(seconds, compiling, grads, memory)


def memory_of(config: Config, name: str, method: str) -> Memory:
    torch.set_num_threads(config.threads)
    unroll = cases(config)[name].unroll(config.seed)
    function = methods(unroll, config.compiled)[method]
    function(unroll.batches[:WARMUP])
    # In this order, because the profiler takes memory itself.
    resident = peak_resident(lambda: function(unroll.batches)) if config.isolated else None
    return Memory(peak_of_tensors(function, unroll.batches), resident)


def longer(config: Config) -> Summary:
    """Return the time of twice as many steps of mlp over that of as many."""
    steps = config.long
    unroll = cases(config)["mlp"]._replace(horizon=2 * steps).unroll(config.seed)
    fast = methods(unroll, config.compiled)["fast"]
    runs = {"once": lambda: fast(unroll.batches[:steps]), "twice": lambda: fast(unroll.batches)}
    take_turns(runs, 1, lambda: None)
    seconds = take_turns(runs, config.rounds, lambda: None)
    return {f"time_t{2 * steps}_over_t{steps}": ratio(seconds["twice"], seconds["once"])}


def reversible_memory(config: Config) -> Summary:
    """Return what `reversible` keeps for ten times as many steps over that for as many."""
    torch.set_num_threads(config.threads)
    steps = config.long
    small = Case(partial(models.mlp, 64, 32, CLASSES), images(64), 32, 10 * steps, rounds=1)
    unroll = small.unroll(config.seed)
    estimate = estimates(unroll, ReversibleMomentum())
    found: list[Estimate] = []
    peaks = [
        peak_of_tensors(lambda batches: found.append(estimate(reversible, batches)), unroll.batches[:horizon])
        for horizon in (WARMUP, steps, 10 * steps)
    ]
    bits = found[-1].info["bits_per_parameter_step"].item()
    return {
        f"reversible_memory_t{10 * steps}_over_t{steps}": round(peaks[2] / peaks[1], 4),
        "reversible_bits_per_parameter_step": round(bits, 4),
    }


def alone(config: Config, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function, if wanted in a process of its own in which nothing has been allocated before."""
    if not config.isolated:
        return function(config, *args)
    return isolated([__name__, *PEERS, "torch._dynamo", "torch._inductor"], function, config, *args)
