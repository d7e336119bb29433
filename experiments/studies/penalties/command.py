"""What does a penalty for each weight gain over the best single one?"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from experiments import data
from experiments.reporting.summary import write_summary
from experiments.runner import experiment
from experiments.runner.presets import Preset
from experiments.runner.progress import progress
from experiments.runner.settings import FromZero
from experiments.studies.penalties import digits, regression, report
from experiments.studies.penalties.digits import Part, Sizes, Split
from experiments.studies.penalties.regression import SHAPE, Learning, Regression
from experiments.studies.penalties.report import Fit, Outcome
from metafop.tensorboard import Logger


@dataclass(frozen=True)
class Config:
    """An L2 penalty for each weight of a logistic regression on MNIST, against the best single penalty.

    The 7,840 penalties are learned by the hypergradient of the validation loss through all of training
    (Maclaurin et al., 2015), from the best single one of a fine grid. Digits of a split that nothing is
    differentiated on say at which step of learning to stop. The test digits are looked at once, in the end.

    smoke: seconds, on generated images. small: 10 splits. paper: 10,000 digits to train on, as in Maclaurin's
    other experiments on MNIST (hours).
    """

    preset: Preset = "small"
    splits: int = 10  # of the digits, each drawn with its own seed
    sizes: Sizes = field(default_factory=Sizes)
    learning: Learning = field(default_factory=Learning)
    steps: int = 100  # of training, on all training digits each
    lr: float = 0.1  # of training
    momentum: FromZero[float] = 0.9  # of training
    grid: int = 41  # single penalties to choose from, from 1e-5 to 1
    source: data.Name = "mnist"
    data: Path | None = None  # folder that holds mnist/; if None, METAFOP_DATA, else fetched
    seed: FromZero[int] = 0  # of the first split
    threads: int = 1  # that torch may use
    out: Path = Path("runs/penalties")  # folder for the picture, the numbers and TensorBoard events


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        preset="smoke",
        splits=2,
        sizes=Sizes(training=50, validation=100, held=50, test=64),
        learning=Learning(meta_steps=3, single_meta_steps=2, compile=False),
        steps=10,
        grid=5,
        source="generated-digits",
        out=Path("runs/penalties-smoke"),
    ),
    "small": Config(),
    "paper": Config(preset="paper", sizes=Sizes(training=10_000), out=Path("runs/penalties-paper")),
}


def main(config: Config) -> None:
    began = time.perf_counter()
    if why := digits.shortage(config.source, config.data, config.sizes):
        raise SystemExit(why)
    experiment.begin(config)
    task = regression.regression(config.lr, config.momentum, config.steps)
    outcomes = []
    with progress(config.splits * (config.learning.single_meta_steps + config.learning.meta_steps)) as tick:
        for i in range(config.splits):
            split = digits.split(config.source, config.data, config.sizes, config.seed + i)
            outcomes.append(outcome(config, task, split, lambda i=i: tick(f"split {i + 1}")))
    figures = report.report(config.out, outcomes)
    figures["seconds"] = round(time.perf_counter() - began, 1)
    report.draw(config.out, outcomes)
    with Logger(config.out) as logger:
        report.log(logger, outcomes)
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    write_summary(config.out, figures)


def outcome(config: Config, task: Regression, split: Split, tick: Callable[[], None]) -> Outcome:
    """Choose a single penalty, learn one, and learn one for each weight; then look at the test digits."""
    settings, grid = config.learning, torch.logspace(-5, 0, config.grid)
    losses = regression.grid_losses(task, grid, split)
    best, start = grid[losses.argmin()], torch.tensor(settings.single_start)
    single = regression.learn(task, settings, split, start, settings.single_meta_steps, tick)
    own = regression.learn(task, settings, split, best.repeat(SHAPE), settings.meta_steps, tick)

    def fit(l2: Tensor, digits: Part) -> Fit:
        params = task.trained(l2, digits)
        loss, accuracy = regression.error(params, split.test), regression.accuracy(params, split.test)
        return Fit(l2, loss.item(), accuracy.item())

    # The same prior with more digits is a smaller penalty beside their mean loss.
    share = config.sizes.training / config.sizes.drawn
    fits = {
        "single": fit(best, split.training),
        "single_learned": fit(single.l2, split.training),
        "each": fit(own.l2, split.training),
        "more_digits": fit(share * best, split.all_but_test),
    }
    return Outcome(fits, own)
