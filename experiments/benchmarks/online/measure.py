"""The times of steps that take turns, and how long compiling them takes."""

import time
from collections.abc import Callable
from typing import Any

import torch

from experiments.benchmarks.online.cases import Case

WARMUP = 3  # rounds


def compile_all(cases: dict[str, Case], batch: Any) -> tuple[dict[str, Case], dict[str, float]]:
    """Return the cases compiled, each as one graph, and how many seconds the first step of each took."""
    torch.compiler.reset()  # torch compiles one piece of code for a few callers at most
    compiled, seconds = {}, {}
    for name, (step, start) in cases.items():
        compiled[name] = Case(torch.compile(step, fullgraph=True), start)
        begin = time.perf_counter()
        compiled[name].step(start, batch)
        seconds[name] = time.perf_counter() - begin
    return compiled, seconds


def measure(
    cases: dict[str, Case], batch: Any, repeats: int, tick: Callable[[], None]
) -> dict[str, list[float]]:
    """Return the seconds of each step, all cases taking turns; the first rounds warm up and are left out."""
    states = {name: case.start for name, case in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(WARMUP + repeats):
        for name, case in cases.items():
            begin = time.perf_counter()
            states[name], _ = case.step(states[name], batch)
            times[name].append(time.perf_counter() - begin)
        tick()
    return {name: seconds[WARMUP:] for name, seconds in times.items()}
