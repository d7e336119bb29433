"""The settings of distillation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments import data
from experiments.runner.settings import FromZero


@dataclass(frozen=True)
class Config:
    """Ten images, learned through 30 steps of training on them, that teach a network MNIST.

    An image for each class and a learning rate for each step are learned by the loss on real digits after the
    steps, from one known start of the network or from a new start at every meta step (Wang et al., 2018). The
    test images are evaluated once, at the end.

    smoke: seconds, on generated images. small: 2,500 meta steps, about five minutes on one core.
    """

    preset: Literal["smoke", "small"] = "small"
    steps: int = 30  # of training, each on all ten images
    meta_steps: int = 2500
    batch: int = 1000  # real digits of a meta step
    hidden: int = 100  # units between the pixels and the classes
    lr: float = 0.05  # of every step, to begin with
    images_lr: float = 0.08  # of Adam on the images; falls to zero along a cosine
    rates_lr: float = 0.02  # of Adam on the logarithms of the learning rates; falls with it
    clip: float = 0.1  # norm of a hypergradient, at most
    fresh: int = 20  # new starts, to test by
    images: int = 50_000  # real digits to learn from, the first ones
    validation: int = 10_000  # those after them, for the curve alone
    test: int = 10_000
    look_every: int = 50  # meta steps, at the validation digits
    rounds: int = 10  # of measuring the time of a meta step, each estimator once in each
    compiled: bool = True  # compile the steps
    source: data.Name = "mnist"
    data: Path | None = None  # folder that holds mnist/; if None, METAFOP_DATA, else fetched
    seed: FromZero[int] = 0
    threads: int = 1
    out: Path = Path("runs/distillation")

    def __post_init__(self) -> None:
        if self.fresh < 2:
            raise ValueError(f"A deviation over starts needs two, got fresh={self.fresh}. Pass 2 or more.")


PRESETS = {
    "smoke": Config(
        preset="smoke",
        steps=3,
        meta_steps=6,
        batch=32,
        hidden=8,
        fresh=2,
        images=256,
        validation=128,
        test=128,
        look_every=3,
        rounds=1,
        compiled=False,
        source="generated-digits",
        out=Path("runs/distillation-smoke"),
    ),
    "small": Config(),
}
