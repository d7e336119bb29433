"""The settings of bench-unroll, and the networks that it measures."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from experiments.benchmarks.unroll.methods import CLASSES, Case, convnet
from experiments.runner.settings import FromZero, MayBeEmpty
from experiments.vision import models


@dataclass(frozen=True)
class Config:
    """Differentiates through T steps in every tensor's learning rate: time, peak memory, and agreement."""

    rounds: int = 15  # rounds, each method once in each; a third as many for cnn and deep, a fifth for small
    horizon: int = 50  # steps of mlp and cnn
    deep_horizon: int = 256  # steps of deep
    small_horizon: int = 2000  # steps of small, for the ways to take for long horizons
    long: int = 100  # steps of mlp, against twice as many; and of a reversible training, against ten times
    batch: int = 128  # examples in a batch; half as many for cnn, a quarter for small
    width: int = 100  # of the hidden layers of mlp
    deep_width: int = 256  # of the layers of deep
    small_width: int = 100  # of the hidden layers of small
    channels: int = 16  # of the first layer of cnn
    checked: tuple[int, ...] = (20, 100)  # steps for which it is measured what the checks cost
    ways: bool = True  # measure every method. Without, what the checks cost alone
    nets: MayBeEmpty[tuple[Literal["mlp", "cnn", "deep"], ...]] = ()  # measure every method on these alone
    only_leaves: bool = False  # measure what a learned leaf of the loss costs alone
    only_long_horizons: bool = False  # measure small alone, with the ways for long horizons
    compiled: bool = True  # compile ours. Takes about a minute a case
    isolated: bool = True  # a process for each measure of memory. Without, resident memory is not reported
    threads: int = 1  # threads that torch may use
    seed: FromZero[int] = 0
    out: Path = Path("runs/bench-unroll")  # folder for summary.json, config.json, the tables and the figure


def cases(config: Config) -> dict[str, Case]:
    mlp = partial(models.mlp, 784, *3 * [config.width], CLASSES)
    cnn = partial(convnet, config.channels)
    deep = partial(models.mlp, *6 * [config.deep_width], CLASSES)
    half, few = max(config.batch // 2, 2), max(config.rounds // 3, 1)  # batch norm needs two
    return {
        "mlp": Case(mlp, (784,), config.batch, config.horizon, config.rounds),
        "cnn": Case(cnn, (3, 32, 32), half, config.horizon, few),
        "deep": Case(deep, (config.deep_width,), config.batch, config.deep_horizon, few),
    }


def small(config: Config) -> Case:
    """Return the case of long horizons: so small that all its carries fit into memory."""
    mlp = partial(models.mlp, 64, *2 * [config.small_width], CLASSES)
    few = max(config.rounds // 5, 1)
    return Case(mlp, (64,), max(config.batch // 4, 1), config.small_horizon, few)
