"""How long compiling takes, ours and JAX's: the first time on a machine, and again in another process."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from experiments.benchmarks.unroll.config import Config, compiled_cases
from experiments.benchmarks.unroll.methods import methods
from experiments.measuring.cores import stay_on
from experiments.measuring.isolation import fresh
from experiments.measuring.timing import ratio
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table

Library = Literal["ours", "jax"]
PROCESSES = 5  # in each round


def costs(config: Config, tick: Callable[[str], None]) -> Summary:
    """Return the seconds that compiling takes, and ours over JAX's: medians over rounds."""
    figures: Summary = {}
    for net, case in compiled_cases(config).items():
        rounds = [_round(config, net, partial(tick, f"{net}, compiling")) for _ in range(case.rounds)]
        cold, warm, jax_cold, jax_warm = map(list, zip(*rounds, strict=True))
        figures |= {
            f"{net}_compile_seconds": round(median(cold), 2),
            f"{net}_compile_seconds_warm": round(median(warm), 2),
            f"{net}_jax_compile_seconds": round(median(jax_cold), 2),
            f"{net}_jax_compile_seconds_warm": round(median(jax_warm), 2),
            f"{net}_compile_seconds_over_jax": ratio(cold, jax_cold),
            f"{net}_compile_seconds_over_jax_warm": ratio(warm, jax_warm),
            f"{net}_compile_seconds_warm_over_jax_cold": ratio(warm, jax_cold),
        }
    return figures


def _round(config: Config, net: str, tick: Callable[[], None]) -> tuple[float, float, float, float]:
    """Return the seconds of ours, cold and warm, and of JAX's, cold and warm, each in a new process."""

    def timed(library: Library, variables: dict[str, str]) -> float:
        seconds = fresh(variables, seconds_to_compile, config, net, library)
        tick()
        return seconds

    with TemporaryDirectory() as folder:
        # Headers that torch precompiles lie in the folder for temporary files, whatever its cache.
        ours = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "torch")), "TMPDIR": folder}
        none = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        kept = {
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder, "jax")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        cold, warm, jax_cold = timed("ours", ours), timed("ours", ours), timed("jax", none)
        timed("jax", kept)  # fills its cache, which it has only if asked
        return cold, warm, jax_cold, timed("jax", kept)


def seconds_to_compile(config: Config, net: str, library: Library) -> float:
    """Return by how much the first estimate of this process takes longer than the second.

    Modules of torch and JAX are imported before, but not what ours imports only to compile.
    """
    torch.set_num_threads(config.threads)
    stay_on(config.threads)
    unroll = compiled_cases(config)[net].unroll(config.seed)
    if library == "jax":
        from experiments.benchmarks.unroll.by_jax import jax_methods

        run = jax_methods(unroll)["jax"]
    else:
        run = partial(methods(unroll, config.compiled)["fast"], unroll.batches)
    first, second = _seconds(run), _seconds(run)
    return first - second


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def show(config: Config, figures: Summary) -> None:
    rows = [[net, *(f"{figures[f'{net}_{what}']:.1f}" for what in SECONDS)] for net in compiled_cases(config)]
    title = "Seconds to compile: in a first process, and in a second one that finds the caches of the first"
    show_table(config.out, title, ["net", "ours", "ours again", "JAX", "JAX again"], rows)


SECONDS = ("compile_seconds", "compile_seconds_warm", "jax_compile_seconds", "jax_compile_seconds_warm")
