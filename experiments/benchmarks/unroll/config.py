"""The settings of bench-unroll, and the networks that it measures."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from experiments.benchmarks.unroll.cases import CLASSES, Case, convnet, images
from experiments.benchmarks.unroll.rules import ADAM
from experiments.language.tokens import draw_tokens
from experiments.language.transformer import Transformer
from experiments.runner.settings import FromZero, MayBeEmpty
from experiments.vision import models

Net = Literal["mlp", "cnn", "deep", "transformer"]

HEADS, VOCABULARY = 4, 256  # of transformer


@dataclass(frozen=True)
class Config:
    """Differentiates through T steps in every tensor's learning rate: time, peak memory, and agreement."""

    # rounds, each method once in each; a third as many for cnn and deep, a fifth for transformer and small
    rounds: int = 15
    horizon: int = 50  # steps of mlp and cnn
    deep_horizon: int = 256  # steps of deep
    transformer_horizon: int = 8  # steps of transformer
    small_horizon: int = 2000  # steps of small, for the ways to take for long horizons
    jax_cnn_horizon: int = 20  # steps of cnn, against JAX
    jax_deep_horizon: int = 64  # steps of deep, against JAX
    processes: int = 3  # new processes in which compiling mlp is timed; a third as many for transformer
    long: int = 100  # steps of mlp, against twice as many; and of a reversible training, against ten times
    batch: int = 128  # examples in a batch; half as many for cnn, a quarter for small, 1/16 for transformer
    width: int = 100  # of the hidden layers of mlp
    deep_width: int = 256  # of the layers of deep
    small_width: int = 100  # of the hidden layers of small
    channels: int = 16  # of the first layer of cnn
    layers: int = 4  # of transformer
    transformer_width: int = 128  # a multiple of its 4 heads
    length: int = 256  # tokens in a sequence
    checked: tuple[int, ...] = (20, 100)  # steps for which it is measured what the checks cost
    ways: bool = True  # measure every method. Without, what the checks cost alone
    nets: MayBeEmpty[tuple[Net, ...]] = ()  # measure every method on these alone; or JAX, or compiling
    jax: bool = True  # measure against JAX, and how long compiling takes, its and ours. Without, neither
    only_leaves: bool = False  # measure what a learned leaf of the loss costs alone
    only_long_horizons: bool = False  # measure small alone, with the ways for long horizons
    only_jax: bool = False  # measure ours against JAX alone, on all nets or on --nets
    only_compiling: bool = False  # measure how long compiling takes alone
    compiled: bool = True  # compile ours. Takes about a minute a case
    isolated: bool = True  # a process for each measure of memory, and for JAX. Without, no resident memory
    threads: int = 1  # threads that torch may use
    seed: FromZero[int] = 0
    out: Path = Path("runs/bench-unroll")  # folder for summary.json, config.json, the tables and the figure


def cases(config: Config) -> dict[str, Case]:
    """Return the cases of every network, each with what all methods are given."""
    mlp = partial(models.mlp, 784, *3 * [config.width], CLASSES)
    cnn = partial(convnet, config.channels)
    deep = partial(models.mlp, *6 * [config.deep_width], CLASSES)
    width, length = config.transformer_width, config.length
    transformer = partial(Transformer, config.layers, width, HEADS, length, VOCABULARY)
    tokens = partial(draw_tokens, length=length, vocabulary=VOCABULARY)
    half, sixteenth = max(config.batch // 2, 2), max(config.batch // 16, 1)  # batch norm needs two
    third, fifth = max(config.rounds // 3, 1), max(config.rounds // 5, 1)
    return {
        "mlp": Case(mlp, images(784), config.batch, config.horizon, config.rounds),
        "cnn": Case(cnn, images(3, 32, 32), half, config.horizon, third),
        "deep": Case(deep, images(config.deep_width), config.batch, config.deep_horizon, third),
        "transformer": Case(transformer, tokens, sixteenth, config.transformer_horizon, fifth, ADAM),
    }


def chosen(config: Config, otherwise: Sequence[Net] = get_args(Net)) -> dict[str, Case]:
    """Return the cases of the nets that are asked for."""
    return {name: case for name, case in cases(config).items() if name in (config.nets or otherwise)}


def jax_cases(config: Config) -> dict[str, Case]:
    """Return the cases of the nets asked for, at the horizons at which ours is measured against JAX."""
    horizons = {"cnn": config.jax_cnn_horizon, "deep": config.jax_deep_horizon}
    return {
        name: case._replace(horizon=horizons.get(name, case.horizon)) for name, case in chosen(config).items()
    }


def compiled_cases(config: Config) -> dict[str, Case]:
    """Return the cases of which compiling is timed: those of the nets asked for, or mlp and transformer."""
    rounds = {"mlp": config.processes}
    return {
        name: case._replace(rounds=rounds.get(name, max(config.processes // 3, 1)))
        for name, case in chosen(config, ("mlp", "transformer")).items()
    }


def small(config: Config) -> Case:
    """Return the case of long horizons: so small that all its carries fit into memory."""
    mlp = partial(models.mlp, 64, *2 * [config.small_width], CLASSES)
    return Case(mlp, images(64), max(config.batch // 4, 1), config.small_horizon, max(config.rounds // 5, 1))
