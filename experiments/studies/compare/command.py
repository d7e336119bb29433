"""When do online, one-step hypergradients suffice, and when do they mislead?"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from experiments.reporting.summary import write_summary
from experiments.runner import experiment
from experiments.runner.progress import progress
from experiments.runner.settings import FromZero
from experiments.studies.compare import cost, horizon_report, horizons, noisy_quadratic, training_curves
from experiments.studies.compare.digits import digits
from experiments.studies.compare.horizons import Horizons
from experiments.studies.compare.noisy_quadratic import Quadratic
from experiments.studies.compare.training_curves import Curves
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
    seed: FromZero[int] = 0  # of the data's split, the networks, the batches and the noise
    threads: int = 1  # that torch may use
    out: Path = Path("runs/compare")  # folder for pictures, numbers and TensorBoard events


def main(config: Config) -> None:
    began = time.perf_counter()
    remove_old_schedule(config)
    generator = experiment.begin(config)
    data = digits(config.hidden, max(config.horizons.networks, config.curves.networks), config.seed)

    with progress(config.horizons.ticks + config.quadratic.ticks) as tick:
        measured = horizons.measure(config.horizons, data, generator, tick)
        found = noisy_quadratic.measure(config.quadratic, generator, tick)
    methods = training_curves.prepare(config.curves, data, config.seed, generator, config.out)
    with progress(len(methods) * config.curves.steps) as tick:
        trained = training_curves.measure(config.curves, data, methods, generator, tick)

    figures = horizon_report.report(config.horizons, measured, config.out)
    figures |= cost.report(config.horizons, config.rounds, data, generator, config.out)
    figures |= noisy_quadratic.report(config.quadratic, found, config.out)
    figures |= training_curves.report(config.curves, methods, trained, config.out)
    horizon_report.draw(config.horizons, measured, config.out)
    noisy_quadratic.draw(config.quadratic, found, config.out)
    training_curves.draw(config.curves, trained, config.out)
    sentences = horizon_report.conclusions(config.horizons, measured) + noisy_quadratic.conclusions(
        config.quadratic, found
    )
    sentences += training_curves.conclusions(config.curves, methods, trained)
    show_conclusions(config.out, sentences)
    figures["seconds"] = round(time.perf_counter() - began, 1)
    with Logger(config.out) as logger:
        horizon_report.log(config.horizons, measured, logger)
        noisy_quadratic.log(config.quadratic, found, logger)
        training_curves.log(trained, logger)
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    write_summary(config.out, figures)


def remove_old_schedule(config: Config) -> None:
    """Remove what was learned by unrolling, unless a run with the very same settings was interrupted."""
    settings = json.loads(json.dumps(asdict(config), default=str))
    same = experiment.earlier(config).get("config") == settings
    if not same or (config.out / "summary.json").exists():
        for pattern in ("checkpoint.pt", "events.out.tfevents.*"):
            for old in (config.out / "unrolled").glob(pattern):
                old.unlink()


def show_conclusions(out: Path, sentences: list[str]) -> None:
    """Print the conclusions, one sentence each, and add them to tables.md."""
    lines = [f"- {sentence}" for sentence in sentences]
    Console(markup=False, highlight=False).print("\n".join(lines), soft_wrap=True)
    with (out / "tables.md").open("a") as file:
        file.write("\n".join(lines) + "\n")
