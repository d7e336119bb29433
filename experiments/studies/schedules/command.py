"""Do schedules that are learned through training beat the best of many random ones?"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from experiments import data
from experiments.reporting.summary import write_summary
from experiments.runner import experiment
from experiments.runner.presets import Preset
from experiments.runner.progress import progress
from experiments.runner.settings import FromZero
from experiments.studies.schedules import learning, network, one_cycle, report
from experiments.studies.schedules.learning import Learning
from experiments.studies.schedules.network import Network
from metafop import tree
from metafop.tensorboard import Logger


@dataclass(frozen=True)
class Config:
    """Learning rates for each step, layer and kind on MNIST, learned, against random one-cycle schedules.

    A network 784-50-50-50-10 is trained for 100 steps (Maclaurin et al., 2015). Learned are a learning rate
    and momentum for every step and parameter tensor, and the scale of the start of each tensor. What is
    learned, and the best of the random schedules, train fresh networks on fresh orders of the batches.

    smoke: seconds, on generated images. small: 50 steps of learning, 200 random schedules. paper: Maclaurin's
    start and steps of learning, 100 of them on a draw each.
    """

    preset: Preset = "small"
    network: Network = field(default_factory=Network)
    learning: Learning = field(default_factory=Learning)
    draws: int = 6  # starts and orders of the batches: for a step of learning, and to choose a schedule by
    fresh: int = 10  # others, to report on
    random: int = 200  # one-cycle schedules
    test: int = 10_000  # digits to test on
    source: data.Name = "mnist"
    data: Path | None = None  # folder that holds mnist/; if None, METAFOP_DATA, else fetched
    seed: FromZero[int] = 1  # of all draws and schedules; on that of 0, meta_lr was found to be too large
    threads: int = 1  # that torch may use
    out: Path = Path("runs/schedules")  # folder for the picture, the numbers and TensorBoard events


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        preset="smoke",
        network=Network(widths=(784, 8, 10), steps=5, batch=20, images=60),
        learning=Learning(meta_steps=3, watch_every=2, compile=False),
        draws=2,
        fresh=2,
        random=12,
        test=64,
        source="generated-digits",
        out=Path("runs/schedules-smoke"),
    ),
    "small": Config(),
    "paper": Config(
        preset="paper",
        learning=Learning(lr=0.37, momentum=0.5, meta_steps=100),
        draws=1,
        out=Path("runs/schedules-paper"),
    ),
}


def main(config: Config) -> None:
    began = time.perf_counter()
    net, settings = config.network, config.learning
    digits, test = network.digits(config.source, config.data, net.images, config.test)
    generator = experiment.begin(config)
    training = net.training()
    start = net.init_meta(training, settings.lr, settings.momentum)
    schedules = one_cycle.random(config.random, generator)
    draws = [net.draw(config.draws, generator) for _ in range(settings.meta_steps)]
    fresh = net.draw(config.fresh, generator)

    chunks = -(-config.random // one_cycle.CHUNK)
    with Logger(config.out) as logger, progress(settings.meta_steps + chunks) as tick:
        learned = learning.learn(training, start, settings, draws, digits, logger, lambda: tick("learning"))
        best = one_cycle.chosen(
            training, start, schedules, draws[0], digits, lambda: tick("random schedules")
        )
        rivals = {
            "learned": learned.meta,
            "random": best.meta,
            "learned_usual_start": learned.meta._replace(loss=start.loss),
            "random_learned_start": best.meta._replace(loss=learned.meta.loss),
            "start": start,
        }
        every = tree.stack([*rivals.values(), *learned.watched.values()])
        found = network.results(training, every, fresh, digits, test)
        figures = report.report(config.out, list(rivals), found, spent(config), learned, best)
        figures["seconds"] = round(time.perf_counter() - began, 1)
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    of_random = found.training[:, list(rivals).index("random")].mean().item()
    report.draw(config.out, learned, best, found.training[:, len(rivals) :], of_random)
    write_summary(config.out, figures)


def spent(config: Config) -> dict[str, int]:
    """Return the gradients that learning takes and that choosing among random schedules takes."""
    training = config.draws * config.network.steps
    learned = learning.PER_STEP * config.learning.meta_steps * training
    return {"learned": learned, "random": config.random * training}
