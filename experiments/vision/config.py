"""What the experiments on MNIST and CIFAR-10 share: settings, presets, and the run of a method and a seed."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import data
from experiments.data import files
from experiments.runner import study
from experiments.runner.presets import Preset
from experiments.runner.settings import FromZero
from experiments.vision.methods import Method
from experiments.vision.task import Classify, shortage


@dataclass(frozen=True)
class VisionConfig:
    """The settings that every one of these experiments has. Each adds its own, and its own defaults."""

    preset: Preset = "small"
    images: int = 10_000  # to train on, the first ones
    epochs: int = 15
    seeds: int = 3
    source: data.Name = "cifar10"
    widths: tuple[int, ...] = ()  # of the layers
    batch: int = 128
    data: Path | None = None  # folder that holds cifar10/ or mnist/; if None, METAFOP_DATA, else fetched
    workers: int = study.WORKERS  # runs side by side
    seed: FromZero[int] = 0  # the first
    threads: int = 1  # of each run
    out: Path = Path("runs")

    @property
    def all_seeds(self) -> range:
        return range(self.seed, self.seed + self.seeds)


# What the presets on CIFAR-10 have in common, to be given to a `Config` with what is its own.
SMOKE: dict[str, Any] = {"preset": "smoke", "source": "generated", "widths": (2, 4), "workers": 1}
PAPER: dict[str, Any] = {"preset": "paper", "images": 50_000, "widths": (96, 192), "epochs": 150}


def prepare(config: VisionConfig, validation: int = 0, test: int = 0) -> None:
    """Set the data folder for this process and its workers.

    Raises SystemExit at once if the dataset cannot be read, or has fewer images than are needed.
    """
    if config.batch > config.images:
        raise SystemExit(
            f"There are {config.images} images to train on, fewer than a batch of {config.batch}. Pass a "
            "smaller --batch."
        )
    if config.data is not None:
        os.environ[files.FOLDER] = str(config.data)
    if why := shortage(config.source, config.images, validation, test):
        raise SystemExit(why)


def common_task(config: VisionConfig, method: Method, seed: int) -> Classify:
    """Return a run of the 9-layer conv net with a constant learning rate, trained and not evaluated.

    An experiment replaces what is different in its own runs.
    """
    return Classify(
        method=method,
        seed=seed,
        data=config.source,
        images=config.images,
        validation=0,
        test=0,
        model="all-conv",
        widths=tuple(config.widths),
        epochs=config.epochs,
        decays=(),
        batch=config.batch,
    )
