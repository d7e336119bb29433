"""What learning online costs: the online step over the plain training step, eager and compiled."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from experiments import models, run
from metafop import Adam, Momentum, Online, Training, assign, functional, hypergradients


@dataclass(frozen=True)
class Config:
    """Times one online step over one plain step, on an MLP and on a 9-layer conv net, in one process."""

    repeats: int = 60
    """Rounds of measurement; in each, every case takes one step."""
    batch: int = 128
    """Examples in a batch."""
    narrow: int = 16
    """Channels of the conv net's first three layers."""
    wide: int = 32
    """Channels of the layers after."""
    compiled: bool = True
    """Measure under torch.compile too. Compiling takes about a minute a case."""
    threads: int = 1
    """Threads that torch may use."""
    seed: int = 0
    out: Path = Path("runs/bench-online")
    """Folder for summary.json, config.json and the times."""


class Case(NamedTuple):
    """One way to take a step: `step(state, batch)` and the state to start from."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    start: Any


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "closed": {"credit": "gradient", "guards": ()},
    "autograd": {"credit": "gradient", "guards": (), "hypergradient": hypergradients.by_autograd},
}


def main(config: Config) -> None:
    generator = run.begin(config)
    torch.manual_seed(config.seed)  # nn.Module draws its first weights from the global generator
    networks: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "mlp": (models.mlp(784, 100, 100, 100, 10), (784,)),
        "cnn": (models.all_conv(config.narrow, config.wide), (3, 32, 32)),
    }
    figures: dict[str, run.Figure] = {}
    rows: list[list[str]] = []
    for name, (model, shape) in networks.items():
        inputs = torch.randn(config.batch, *shape, generator=generator)
        batch = (inputs, torch.randint(10, (config.batch,), generator=generator))
        eager = cases(model, generator)
        times = measure(f"{name}, eager", eager, batch, config.repeats)
        kinds = {"eager": times}
        if config.compiled:
            compiled = {}
            for case, (step, start) in eager.items():
                torch.compiler.reset()
                compiled[case] = Case(torch.compile(step, fullgraph=True), start)
                seconds = compile_seconds(f"{name}, compiling {case}", compiled[case], batch)
                figures[f"{name}_{case}_compile_seconds"] = round(seconds, 1)
            kinds["compiled"] = measure(f"{name}, compiled", compiled, batch, config.repeats)
        for kind, times in kinds.items():
            for case in times:
                # Two steps of one round ran side by side: their ratio is free of the machine's slow drift.
                ratio = median(a / b for a, b in zip(times[case], times["plain"], strict=True))
                figures[f"{name}_{case}_{kind}_ms"] = round(1e3 * median(times[case]), 3)
                if case != "plain":
                    figures[f"{name}_{case}_{kind}_over_plain"] = round(ratio, 4)
                rows.append([f"{name}, {case}, {kind}", f"{1e3 * median(times[case]):.2f}", f"{ratio:.3f}"])
            pairs = zip(times["closed"], times["autograd"], strict=True)
            figures[f"{name}_closed_over_autograd_{kind}"] = round(median(a / b for a, b in pairs), 4)
    run.summarize(config.out, figures)
    run.show("One step", ["case", "ms", "over plain"], rows)
    run.finish(config.out)


def cases(model: nn.Module, generator: Generator) -> dict[str, Case]:
    """Return the plain step with momentum, and each way of learning its preconditioners online."""

    def batch_loss(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    loss, params, buffers = functional.from_module(model, batch_loss)
    hyper = Momentum().hyper(lr=0.01)
    plain, learned = Training(loss, Momentum()), Training(loss, Momentum(), assign(params))
    plain_meta, meta = plain.meta(params, hyper), learned.meta(params, hyper, generator)
    result = {
        "plain": Case(lambda state, batch: plain.step(plain_meta, state, batch), plain.init(params, buffers))
    }
    for name, settings in VARIANTS.items():
        online = Online(learned, Adam(), **settings)
        steer = online.meta(meta, Adam().hyper(lr=1e-4))
        state = online.init(meta, learned.init(params, buffers))
        result[name] = Case(lambda state, batch, o=online, s=steer: o.step(s, state, batch), state)
    return result


def compile_seconds(what: str, case: Case, batch: Any) -> float:
    with run.progress() as progress:
        progress.add_task(what, total=None)
        start = time.perf_counter()
        case.step(case.start, batch)
        return time.perf_counter() - start


def measure(what: str, cases: dict[str, Case], batch: Any, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each step, all cases taking turns; the first rounds warm up and are left out."""
    warmup = 3
    states = {name: case.start for name, case in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    with run.progress() as progress:
        for round_ in progress.track(range(warmup + repeats), description=what):
            for name, case in cases.items():
                start = time.perf_counter()
                states[name], _ = case.step(states[name], batch)
                if round_ >= warmup:
                    times[name].append(time.perf_counter() - start)
    return times
