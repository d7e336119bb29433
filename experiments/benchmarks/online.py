"""What learning online costs: the online step over the plain training step, eager and compiled."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.measuring.timing import percent, ratio
from experiments.reporting.summary import Summary, write_summary
from experiments.reporting.tables import show_table
from experiments.runner import experiment
from experiments.runner.progress import progress
from experiments.runner.settings import FromZero
from experiments.vision import models
from metafop import Adam, Momentum, Online, Training, assign, functional, hypergradients
from metafop.tensorboard import Logger


@dataclass(frozen=True)
class Config:
    """Times one online step over one plain step, on an MLP and on a 9-layer conv net, in one process."""

    repeats: int = 60  # rounds of measurement; in each, every case takes one step
    batch: int = 128  # examples in a batch
    narrow: int = 16  # channels of the conv net's first three layers
    wide: int = 32  # channels of the layers after
    compiled: bool = True  # measure under torch.compile too. Compiling takes about a minute a case
    threads: int = 1  # threads that torch may use
    seed: FromZero[int] = 0
    out: Path = Path("runs/bench-online")  # folder for summary.json, config.json and the times


class Case(NamedTuple):
    """A method to take a step: `step(state, batch)`, and the state to start from."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    start: Any


WARMUP = 3  # rounds
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "unchecked": {"skip": ("carry",)},
    "closed": {"credit": "gradient", "guards": ()},
    "autograd": {"credit": "gradient", "guards": (), "hypergradient": hypergradients.by_autograd},
}


def main(config: Config) -> None:
    generator = experiment.begin(config)
    torch.manual_seed(config.seed)  # nn.Module draws its first weights from the global generator
    networks: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "mlp": (models.mlp(784, 100, 100, 100, 10), (784,)),
        "cnn": (models.all_conv(config.narrow, config.wide), (3, 32, 32)),
    }
    kinds = 2 if config.compiled else 1
    figures: Summary = {}
    times: dict[str, dict[str, list[float]]] = {}  # by network and kind, then by case
    with progress(len(networks) * kinds * (WARMUP + config.repeats)) as tick:
        for name, (model, shape) in networks.items():
            inputs = torch.randn(config.batch, *shape, generator=generator)
            batch = (inputs, torch.randint(10, (config.batch,), generator=generator))
            eager = cases(model, generator)
            times[f"{name}_eager"] = measure(eager, batch, config.repeats, lambda: tick("eager"))
            if config.compiled:
                compiled, seconds = compile_all(eager, batch)
                figures |= {f"{name}_{case}_compile_seconds": round(s, 1) for case, s in seconds.items()}
                times[f"{name}_compiled"] = measure(compiled, batch, config.repeats, lambda: tick("compiled"))
    rows = []
    for group, by_case in times.items():
        for case, seconds in by_case.items():
            figures[f"{group}_{case}_ms"] = round(1e3 * median(seconds), 3)
            figures[f"{group}_{case}_over_plain"] = ratio(seconds, by_case["plain"])
            rows.append(
                [group, case, f"{1e3 * median(seconds):.2f}", f"{ratio(seconds, by_case['plain']):.3f}"]
            )
        figures[f"{group}_closed_over_autograd"] = ratio(by_case["closed"], by_case["autograd"])
        figures[f"{group}_checks_percent"] = percent(by_case["default"], by_case["unchecked"])
    show_table(config.out, "One step", ["network", "case", "ms", "over plain"], rows)
    draw(config, times)
    with Logger(config.out) as logger:
        for i in range(config.repeats):
            for group, by_case in times.items():
                logger.info(i, {f"{group}/{case}": torch.tensor(s[i]) for case, s in by_case.items()})
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    write_summary(config.out, figures)


def cases(model: nn.Module, generator: Generator) -> dict[str, Case]:
    """Return the plain step with momentum, and each variant that learns its preconditioners online."""

    def batch_loss(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    loss, params, buffers = functional.from_module(model, batch_loss)
    hyper = Momentum().hyper(lr=0.01)
    plain, learned = Training(loss, Momentum()), Training(loss, Momentum(), assign(params))
    plain_meta, meta = (
        plain.init_meta(params, **hyper._asdict()),
        learned.init_meta(params, generator, **hyper._asdict()),
    )
    result = {
        "plain": Case(lambda state, batch: plain.step(plain_meta, state, batch), plain.init(params, buffers))
    }
    for name, settings in VARIANTS.items():
        online = Online(learned, Adam(), **settings)
        outer_meta = online.init_meta(meta, lr=1e-4)
        state = online.init(meta, learned.init(params, buffers))
        result[name] = Case(lambda state, batch, o=online, m=outer_meta: o.step(m, state, batch), state)
    return result


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


def draw(config: Config, times: dict[str, dict[str, list[float]]]) -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(times), squeeze=False)[0]
    for axes, (group, by_case) in zip(panels, times.items(), strict=True):
        ratios = {case: ratio(seconds, by_case["plain"]) for case, seconds in by_case.items()}
        bars = axes.bar(
            list(ratios), list(ratios.values()), color=["#999999", "#0072b2", "#0072b2", "#56b4e9", "#d55e00"]
        )
        axes.bar_label(bars, fmt="%.2f")
        axes.set_title(group.replace("_", ", "))
        axes.margins(y=0.15)
        axes.tick_params(axis="x", rotation=45)
    panels[0].set_ylabel("time over the plain step")
    figure.savefig(config.out / "times.png", dpi=150)
