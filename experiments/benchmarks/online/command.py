"""What learning online costs: the online step over the plain training step, eager and compiled."""

from collections.abc import Callable

import torch
from torch import Generator, nn

from experiments.benchmarks.online import report
from experiments.benchmarks.online.cases import over_adamw, over_momentum
from experiments.benchmarks.online.config import Config
from experiments.benchmarks.online.measure import WARMUP, compile_all, measure
from experiments.benchmarks.online.report import Times
from experiments.language.tokens import draw_tokens
from experiments.language.transformer import Transformer
from experiments.measuring.cold_start import cold_start
from experiments.reporting.summary import Summary, write_summary
from experiments.runner import experiment
from experiments.runner.progress import progress
from experiments.vision import models

__all__ = ["Config", "main"]

HEADS, VOCABULARY = 4, 256  # of the transformer
Measured = tuple[Times, Summary]  # the times, and how many seconds compiling took


def main(config: Config) -> None:
    generator = experiment.begin(config)
    torch.manual_seed(config.seed)  # nn.Module draws its first weights from the global generator
    networks: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "mlp": (models.mlp(784, 100, 100, 100, 10), (784,)),
        "cnn": (models.all_conv(config.narrow, config.wide), (3, 32, 32)),
    }
    measurements = (2 if config.compiled else 1) * len(networks) + 1
    times: Times = {}
    figures: Summary = {}
    with progress(measurements * (WARMUP + config.repeats)) as tick:
        for name, (model, shape) in networks.items():
            found, compiling = on_images(config, name, model, shape, generator, tick)
            times, figures = times | found, figures | compiling
        found, compiling = on_tokens(config, generator, tick)
    times, figures = times | found, figures | compiling
    figures |= report.figures_of(times)
    report.show(config, times)
    report.draw(config, times)
    report.log(config, times, figures)
    write_summary(config.out, figures)


def on_images(
    config: Config,
    name: str,
    model: nn.Module,
    shape: tuple[int, ...],
    generator: Generator,
    tick: Callable[[str], None],
) -> Measured:
    """Measure every variant of a step on a network, eager ones in turns, then compiled ones in turns."""
    inputs = torch.randn(config.batch, *shape, generator=generator)
    batch = (inputs, torch.randint(10, (config.batch,), generator=generator))
    eager = over_momentum(model, generator)
    times = {f"{name}_eager": measure(eager, batch, config.repeats, lambda: tick("eager"))}
    if not config.compiled:
        return times, {}
    compiled, seconds = compile_all(eager, batch)
    times[f"{name}_compiled"] = measure(compiled, batch, config.repeats, lambda: tick("compiled"))
    return times, {f"{name}_{case}_compile_seconds": round(s, 1) for case, s in seconds.items()}


def on_tokens(config: Config, generator: Generator, tick: Callable[[str], None]) -> Measured:
    """Measure the plain step with AdamW and the online one, eager and compiled, all in turns."""
    model = Transformer(config.layers, config.width, HEADS, config.length, VOCABULARY)
    [batch] = draw_tokens(1, config.sequences, generator, config.length, VOCABULARY)
    cases, figures = over_adamw(model, generator), {}
    with cold_start():
        if config.compiled:
            compiled, seconds = compile_all({"compiled": cases["eager"]}, batch)
            cases, figures = cases | compiled, {"online_transformer_compile_seconds": seconds["compiled"]}
        times = measure(cases, batch, config.repeats, lambda: tick("transformer"))
    return {"online_transformer": times}, {name: round(s, 1) for name, s in figures.items()}
