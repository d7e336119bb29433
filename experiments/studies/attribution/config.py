"""The settings of attribution."""

from dataclasses import dataclass
from pathlib import Path

from experiments import data
from experiments.runner.presets import Preset
from experiments.runner.settings import FromZero


@dataclass(frozen=True)
class Config:
    """What each training digit did to the loss of unseen ones: by derivatives, and by training again.

    smoke: seconds, on generated images. small: three seeds of an MLP on MNIST.
    """

    preset: Preset = "small"
    source: data.Name = "mnist"
    data: Path | None = None  # folder that holds mnist/; if None, METAFOP_DATA, else fetched
    examples: int = 2000  # digits to train on
    epochs: int = 10  # of batches of a tenth of these
    unseen: int = 40  # test digits whose losses are predicted
    lr: float = 0.05  # of every run, but for those that compare some
    dropped: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # shares of the digits to train on
    subsets: int = 100  # that are dropped, for each share
    other_lrs: tuple[float, ...] = (0.01, 0.02, 0.1, 0.2)  # tried with the first seed
    dropped_by_lr: float = 0.05  # share of the digits, to compare learning rates
    seeds: int = 3  # digits, networks, orders and subsets
    seed: FromZero[int] = 0  # the first
    threads: int = 2  # that torch may use
    out: Path = Path("runs/attribution")


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        preset="smoke",
        source="generated-digits",
        examples=100,
        epochs=2,
        lr=0.005,
        unseen=4,
        other_lrs=(0.01,),
        dropped=(0.05, 0.5),
        subsets=5,
        seeds=2,
        threads=1,
        out=Path("runs/attribution-smoke"),
    ),
    "small": Config(),
}
