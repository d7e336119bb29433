"""When do online, one-step hypergradients suffice, and when do they mislead?"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Generator

from experiments import agreement, curves, horizons, quadratic, run
from experiments.curves import Curves
from experiments.digits import Digits, digits
from experiments.horizons import Horizons
from experiments.quadratic import Quadratic
from metafop import Adam, Online, tree
from metafop.hypergradients import adjoint
from metafop.tensorboard import Logger


@dataclass(frozen=True)
class Config:
    """Online against unrolled: when does the derivative of one step suffice to learn how to train?

    One step against T steps on handwritten digits; short-horizon bias on a noisy quadratic; and networks
    trained with hyperparameters that are fixed, tuned, learned online, or learned through a whole horizon.
    """

    horizons: Horizons = field(default_factory=Horizons)
    quadratic: Quadratic = field(default_factory=Quadratic)
    curves: Curves = field(default_factory=Curves)
    hidden: int = 32  # units between the 64 pixels and the 10 classes
    rounds: int = 5  # of measuring times
    seed: int = 0  # of the data's split, the networks, the batches and the noise
    threads: int = 1  # that torch may use
    out: Path = Path("runs/compare")  # folder for pictures, numbers and TensorBoard events


def main(config: Config) -> None:
    began = time.perf_counter()
    forget(config)
    generator = run.begin(config)
    data = digits(config.hidden, max(config.horizons.networks, config.curves.networks), config.seed)

    with run.progress(config.horizons.ticks + config.quadratic.ticks) as tick:
        measured = horizons.measure(config.horizons, data, generator, tick)
        found = quadratic.measure(config.quadratic, generator, tick)
    methods = curves.prepare(config.curves, data, config.seed, generator, config.out)
    with run.progress(len(methods) * config.curves.steps) as tick:
        trained = curves.measure(config.curves, data, methods, generator, tick)

    figures = agreement.report(config.horizons, measured, config.out)
    figures |= cost(config, data, generator)
    figures |= quadratic.report(config.quadratic, found, config.out)
    figures |= curves.report(config.curves, methods, trained, config.out)
    agreement.draw(config.horizons, measured, config.out)
    quadratic.draw(config.quadratic, found, config.out)
    curves.draw(config.curves, trained, config.out)
    sentences = agreement.say(config.horizons, measured) + quadratic.say(config.quadratic, found)
    say(config.out, sentences + curves.say(config.curves, methods, trained))
    figures["seconds"] = round(time.perf_counter() - began, 1)
    with Logger(config.out) as logger:
        agreement.log(config.horizons, measured, logger)
        quadratic.log(config.quadratic, found, logger)
        curves.log(trained, logger)
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    run.finish(config.out, figures)


def forget(config: Config) -> None:
    """Remove what was learned by unrolling, unless a run with the very same settings was interrupted."""
    before = config.out / "config.json"
    settings = json.loads(json.dumps(asdict(config), default=str))
    same = before.exists() and json.loads(before.read_text())["config"] == settings
    if not same or (config.out / "summary.json").exists():
        for pattern in ("checkpoint.pt", "events.out.tfevents.*"):
            for old in (config.out / "unrolled").glob(pattern):
                old.unlink()


def cost(config: Config, data: Digits, generator: Generator) -> dict[str, run.Figure]:
    """Print the time of a step, plain and online, and of the derivative through T; and what each keeps."""
    settings = config.horizons
    training, metas = horizons.trainer(settings, data)
    meta, carry = tree.map(lambda x: x[0], metas), training.init(data.take(torch.tensor(0)))
    online = Online(training, Adam(), ("precond", "hyper.lr", "hyper.decay"))
    steer = online.meta(meta, Adam().hyper(lr=1e-3))
    batches = list(data.draw((max(settings.steps), settings.batch), generator))
    state, _ = online.step(steer, online.init(meta, carry), batches[0])
    cases: dict[str, tuple[Callable[[], Any], int, int]] = {  # what to do, its steps, the bytes it keeps
        "a training step": (lambda: training.step(meta, carry, batches[0]), 1, 0),
        "an online step": (
            lambda: online.step(steer, state, batches[0]),
            1,
            tree.size(state) - tree.size(carry),
        ),
    }
    for steps in settings.steps:
        cases[f"T = {steps}"] = (
            lambda steps=steps: adjoint(training, data.validation, meta, carry, batches[:steps]),
            steps,
            steps * tree.size(carry),
        )
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(1 + config.rounds):
        for name, (case, steps, _) in cases.items():
            calls = max(20 // steps, 1)  # what is short is noisy
            begin = time.perf_counter()
            for _ in range(calls):
                case()
            times[name].append((time.perf_counter() - begin) / calls)
    rows, figures = [], {}
    for name, (_, _, kept) in cases.items():
        seconds = times[name][1:]  # the first round warms up
        plain, learned = (
            median(s / t for s, t in zip(seconds, times[other][1:], strict=True))
            for other in ("a training step", "an online step")
        )
        rows.append(
            [name, f"{1e3 * median(seconds):.1f}", f"{plain:.1f}", f"{learned:.1f}", f"{kept / 1e3:,.0f}"]
        )
        if name.startswith("T"):
            figures[f"t{name[4:]}_over_training_step"] = round(plain, 2)
            figures[f"t{name[4:]}_over_online_step"] = round(learned, 2)
    columns = ["", "ms", "over a training step", "over an online step", "kB kept"]
    run.show(config.out, "What the derivative through T steps takes", columns, rows)
    return figures


def say(out: Path, sentences: list[str]) -> None:
    """Print what the figures show in plain sentences, and add them to tables.md."""
    lines = [f"- {sentence}" for sentence in sentences]
    Console(markup=False, highlight=False).print("\n".join(lines), soft_wrap=True)
    with (out / "tables.md").open("a") as file:
        file.write("\n".join(lines) + "\n")
