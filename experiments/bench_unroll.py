"""What a hypergradient through many steps costs in time and memory: ours, the peers', and training alone."""

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from matplotlib.figure import Figure

from experiments import check_costs, models, run, unrolls
from experiments.bench_online import ratio
from experiments.unrolls import CLASSES, COMPILED, PEERS, WAYS, Case, Grads, peak_of_tensors
from metafop import Estimate, ReversibleMomentum
from metafop.hypergradients import reversible
from metafop.tensorboard import Logger


@dataclass(frozen=True)
class Config:
    """Differentiates through T steps in every tensor's learning rate: time, peak memory, and agreement."""

    rounds: int = 15  # rounds of measurement, each way once in each; a third as many for cnn and deep
    horizon: int = 50  # steps of mlp and cnn
    deep_horizon: int = 256  # steps of deep
    long: int = 100  # steps of mlp, against twice as many; and of a reversible training, against ten times
    batch: int = 128  # examples in a batch; half as many for cnn
    width: int = 100  # of the hidden layers of mlp
    deep_width: int = 256  # of the layers of deep
    channels: int = 16  # of the first layer of cnn
    checked: tuple[int, ...] = (20, 100)  # steps for which it is measured what the checks cost
    ways: bool = True  # measure every way. Without, what the checks cost alone
    compiled: bool = True  # compile ours. Takes about a minute a case
    isolated: bool = True  # a process for each measure of memory. Without, resident memory is not told
    threads: int = 1  # threads that torch may use
    seed: int = 0
    out: Path = Path("runs/bench-unroll")  # folder for summary.json, config.json, the tables and the figure


class Memory(NamedTuple):
    """Bytes at the peak, above those before: of tensors, and of the whole process where that can be known."""

    tensors: int
    resident: int | None


class Result(NamedTuple):
    """What was found, of each way."""

    seconds: dict[str, list[float]]
    compiling: dict[str, float]  # seconds of the first steps, where these compile what no way before them has
    grads: dict[str, Grads]
    memory: dict[str, Memory]


WARMUP = 3  # steps, after which everything is compiled
MIB = 2**20
COLORS = {"loop": "#999999", "training": "#999999", **dict.fromkeys(PEERS, "#d55e00")}  # ours are blue


def main(config: Config) -> None:
    if missing := [name for name in PEERS if find_spec(name) is None]:
        sys.exit(
            f"bench-unroll compares with {' and '.join(missing)}, not installed here. "
            'Run: pip install "metafop[experiments,peers]"'
        )
    run.begin(config)
    results: dict[str, Result] = {}
    runs = sum(len(WAYS) * (case.rounds + 2) for case in cases(config).values())
    with cold_start(), run.progress(runs + 3 if config.ways else 1) as tick:
        looked_at = {name: case for name, case in cases(config).items() if name != "deep"}
        # A percent is less than what others on the machine add to the time on the wall.
        turns = partial(take_turns, tick=lambda: None, clock=time.process_time)
        figures = check_costs.costs(looked_at, config.checked, config.seed, config.compiled, turns)
        tick("checks")
        if config.ways:
            for name, case in cases(config).items():
                results[f"{name}_t{case.horizon}"] = measure(config, name, tick)
            figures |= longer(config)
            tick("longer")
            figures |= alone(config, backward_in_time)
            tick("reversible")
    check_costs.show(config.out, figures)
    for name, result in results.items():
        figures |= summary(name, result)
        figures[f"{name.split('_')[0]}_time_vs_plain_training"] = figures[f"{name}_fast_time_vs_training"]
        show(config, name, result, figures)
    if results:
        draw(config, results, figures)
    log(config, results, figures)
    run.finish(config.out, figures)


def cases(config: Config) -> dict[str, Case]:
    mlp = partial(models.mlp, 784, *3 * [config.width], CLASSES)
    cnn = partial(unrolls.convnet, config.channels)
    deep = partial(models.mlp, *6 * [config.deep_width], CLASSES)
    half, few = max(config.batch // 2, 2), max(config.rounds // 3, 1)  # batch norm needs two
    return {
        "mlp": Case(mlp, (784,), config.batch, config.horizon, config.rounds),
        "cnn": Case(cnn, (3, 32, 32), half, config.horizon, few),
        "deep": Case(deep, (config.deep_width,), config.batch, config.deep_horizon, few),
    }


def measure(config: Config, name: str, tick: Callable[[str], None]) -> Result:
    case = cases(config)[name]
    unroll = case.unroll(config.seed)
    compiling, grads, runs = {}, {}, {}
    for way, function in unrolls.ways(unroll, config.compiled).items():
        begin = time.perf_counter()
        function(unroll.batches[:WARMUP])
        if config.compiled and way in COMPILED:
            compiling[way] = time.perf_counter() - begin
        runs[way] = lambda function=function: function(unroll.batches)
        grads[way] = runs[way]()
        tick(f"{name}, warming up")
    seconds = take_turns(runs, case.rounds, lambda: tick(name))
    memory = {}
    for way in runs:
        memory[way] = alone(config, memory_of, name, way)
        tick(f"{name}, memory")
    return Result(seconds, compiling, grads, memory)


def take_turns(
    runs: dict[str, Callable[[], Any]],
    rounds: int,
    tick: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each run in each round; every other round goes the other way around."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    gc.freeze()  # what has been imported is no garbage, and takes long to look through
    for i in range(rounds):
        for name, function in reversed(runs.items()) if i % 2 else runs.items():
            gc.collect()  # what one leaves behind must not cost the next
            begin = clock()
            function()
            seconds[name].append(clock() - begin)
            tick()
    gc.unfreeze()
    return seconds


def memory_of(config: Config, name: str, way: str) -> Memory:
    torch.set_num_threads(config.threads)
    unroll = cases(config)[name].unroll(config.seed)
    function = unrolls.ways(unroll, config.compiled)[way]
    function(unroll.batches[:WARMUP])
    # In this order, because the profiler takes memory itself.
    resident = unrolls.peak_resident(lambda: function(unroll.batches)) if config.isolated else None
    return Memory(peak_of_tensors(function, unroll.batches), resident)


def longer(config: Config) -> dict[str, run.Figure]:
    """Return the time of twice as many steps of mlp over that of as many."""
    steps = config.long
    unroll = cases(config)["mlp"]._replace(horizon=2 * steps).unroll(config.seed)
    fast = unrolls.ways(unroll, config.compiled)["fast"]
    runs = {"once": lambda: fast(unroll.batches[:steps]), "twice": lambda: fast(unroll.batches)}
    take_turns(runs, 1, lambda: None)
    seconds = take_turns(runs, config.rounds, lambda: None)
    return {f"time_t{2 * steps}_over_t{steps}": ratio(seconds["twice"], seconds["once"])}


def backward_in_time(config: Config) -> dict[str, run.Figure]:
    """Return what `reversible` keeps for ten times as many steps over that for as many."""
    torch.set_num_threads(config.threads)
    steps = config.long
    small = Case(partial(models.mlp, 64, 32, CLASSES), (64,), 32, 10 * steps, rounds=1)
    unroll = small.unroll(config.seed)
    estimate = unrolls.estimates(unroll, ReversibleMomentum())
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


@contextmanager
def cold_start() -> Iterator[None]:
    """Let torch's compiler find nothing that it has kept from before, and its profiler be silent."""
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder, KINETO_LOG_LEVEL="99"),
    ):
        yield


def alone(config: Config, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function, if wanted in a process of its own in which nothing has been allocated before."""
    if not config.isolated:
        return function(config, *args)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PEERS, "torch._dynamo", "torch._inductor"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, config, *args).result()


def summary(name: str, result: Result) -> dict[str, run.Figure]:
    """Return every figure of a case, those "vs_best_peer" against the peer that is better in just that."""
    tensors = {way: float(found.tensors) for way, found in result.memory.items()}
    resident = {way: found.resident for way, found in result.memory.items() if found.resident is not None}
    quick = min(PEERS, key=lambda peer: median(result.seconds[peer]))
    small = min(PEERS, key=lambda peer: tensors[peer])
    figures: dict[str, run.Figure] = {f"{name}_best_peer_time": quick, f"{name}_best_peer_memory": small}
    for way, seconds in result.seconds.items():
        figures |= {
            f"{key(name, way)}_time_vs_best_peer": ratio(seconds, result.seconds[quick]),
            f"{key(name, way)}_time_vs_training": ratio(seconds, result.seconds["training"]),
            f"{key(name, way)}_memory_vs_best_peer": round(tensors[way] / tensors[small], 4),
            f"{key(name, way)}_ms": round(1e3 * median(seconds), 2),
            f"{key(name, way)}_mib": round(tensors[way] / MIB, 2),
            f"{key(name, way)}_error": error(result.grads[way], result.grads["loop"]),
        }
        if way in result.compiling:
            figures[f"{key(name, way)}_compile_seconds"] = round(result.compiling[way], 1)
        if resident:
            best = min(resident[peer] for peer in PEERS)
            figures[f"{key(name, way)}_resident_vs_best_peer"] = round(resident[way] / best, 4)
            figures[f"{key(name, way)}_resident_mib"] = round(resident[way] / MIB, 2)
    return figures


def key(name: str, way: str) -> str:
    return f"{name}_{way.replace(', ', '_')}"


def error(grads: Grads, expected: Grads) -> float | None:
    """Return the largest relative error in any parameter's learning rate."""
    if not grads:
        return None
    found, wanted = torch.stack([grads[k] for k in expected]), torch.stack(list(expected.values()))
    return torch.where(found == wanted, 0, (found - wanted).abs() / wanted.abs()).max().item()


def show(config: Config, name: str, result: Result, figures: dict[str, run.Figure]) -> None:
    columns = {
        "ms": ("ms", ".0f"),
        "over peer": ("time_vs_best_peer", ".2f"),
        "over training": ("time_vs_training", ".2f"),
        "tensor MiB": ("mib", ".1f"),
        "process MiB": ("resident_mib", ".1f"),
        "error": ("error", ".0e"),
        "compile s": ("compile_seconds", ".1f"),
    }

    def cell(way: str, figure: str, form: str) -> str:
        value = figures.get(f"{key(name, way)}_{figure}")
        return "" if value is None else format(value, form)

    rows = [[way, *(cell(way, *column) for column in columns.values())] for way in result.seconds]
    title = f"{name.replace('_t', ', T = ')}; best peer: {figures[f'{name}_best_peer_time']} in time, "
    run.show(config.out, title + f"{figures[f'{name}_best_peer_memory']} in memory", ["way", *columns], rows)


def draw(config: Config, results: dict[str, Result], figures: dict[str, run.Figure]) -> None:
    """Draw time and memory of each way over the best peer's."""
    figure = Figure(figsize=(3.4 * len(results) + 1, 6), layout="constrained")
    panels = figure.subplots(2, len(results), squeeze=False)
    for row, measure in zip(panels, ("time", "memory"), strict=True):
        for axes, (name, result) in zip(row, results.items(), strict=True):
            over = {
                way: figures[f"{key(name, way)}_{measure}_vs_best_peer"] for way in reversed(result.seconds)
            }
            colors = [COLORS.get(way, "#0072b2") for way in over]
            bars = axes.barh(list(over), list(over.values()), color=colors)
            axes.bar_label(bars, fmt="%.2f" if measure == "time" else "%.3f", padding=2)
            axes.axvline(1, color="#d55e00", linewidth=0.8, linestyle=":", zorder=0)
            axes.margins(x=0.2)
            axes.set_title(name.replace("_t", ", T = "))
            axes.set_xlabel(f"{measure} over the best peer's")
            if axes is not row[0]:
                axes.set_yticklabels([])
    figure.savefig(config.out / "unroll.png", dpi=150)


def log(config: Config, results: dict[str, Result], figures: dict[str, run.Figure]) -> None:
    with Logger(config.out) as logger:
        for name, result in results.items():
            for way, seconds in result.seconds.items():
                for i, took in enumerate(seconds):
                    logger.info(i, {f"{name}/{way}": torch.tensor(took)})
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
