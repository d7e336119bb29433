"""Times of several functions that take turns, and how they compare."""

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any


def take_turns(
    runs: dict[str, Callable[[], Any]],
    rounds: int,
    tick: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each run in each round; every other round is in reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    gc.freeze()  # what has been imported is not garbage, and takes long to search
    for i in range(rounds):
        for name, function in reversed(runs.items()) if i % 2 else runs.items():
            gc.collect()  # so that the garbage of one does not cost the next
            begin = clock()
            function()
            seconds[name].append(clock() - begin)
            tick()
    gc.unfreeze()
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of the ratios round by round: the machine's slow drift cancels within a round."""
    return round(median(a / b for a, b in zip(ours, theirs, strict=True)), 4)


def percent(ours: list[float], theirs: list[float]) -> float:
    """Return by how many percent ours takes longer."""
    return round(100 * (ratio(ours, theirs) - 1), 2)
