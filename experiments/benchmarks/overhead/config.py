"""The settings of bench-overhead, and the networks that it measures."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from experiments.benchmarks.overhead.measure import CLASSES, PEERS, PERIOD, Net
from experiments.runner.settings import FromZero
from experiments.vision import models

Name = Literal["mlp", "cnn9_16_32", "cnn9_96_192", "resnet18"]
CANNOT = {"muon": "takes matrices only"}  # why a method is missing on nets that convolve


@dataclass(frozen=True)
class Config:
    """Times the step of FOP, of the SGD around which it is, and of other optimizers, all in one process.

    A step's time is the median over periods of the mean over each: ten steps for an optimizer that does some
    of its work at every tenth, otherwise one. On mlp and cnn9_16_32 each takes thirteen steps in its turn,
    of which the last ten count. On cnn9_96_192 and resnet18, whose steps take seconds, it takes one, and SOAP
    and Shampoo take ten in all. The first two rounds warm up, and do not count.
    """

    nets: tuple[Name, ...] = ("mlp", "cnn9_16_32", "cnn9_96_192", "resnet18")
    repeats: int = 30  # rounds of mlp and cnn9_16_32, of ten steps each
    periods: int = 2  # tens of rounds of cnn9_96_192 and resnet18, of one step each
    batch: int = 128  # examples in a batch
    scale: float = 1.0  # of the channels of the conv nets, and of the 784 inputs of mlp
    peers: bool = True  # measure other optimizers too
    memory: bool = True  # measure memory too, in a process for each optimizer
    clock: Literal["wall", "cpu"] = "wall"  # "cpu" leaves out waiting for a busy machine; for one thread only
    threads: int = 1  # threads that torch may use
    seed: FromZero[int] = 0
    out: Path = Path("runs/bench-overhead")  # folder for summary.json, config.json, the tables and the figure


def nets(config: Config) -> dict[str, Net]:
    """Return the nets. On mlp "fop" is "rank4"."""
    peers = PEERS if config.peers else ()
    ranks = ("rank4", "rank64", "rank4_every_step", "rank64_every_step")
    on_mlp, on_conv = ("sgd", *ranks, "paper", *peers), ("sgd", "fop", "paper", *peers)
    on_conv = tuple(method for method in on_conv if method not in CANNOT)
    periodic = ("fop", "rank4", "rank64", "soap", "shampoo_every_10th")

    def scaled(width: int) -> int:
        return max(round(config.scale * width), 1)

    mlp = partial(models.mlp, scaled(784), 100, 100, 100, CLASSES)
    small = partial(models.all_conv, scaled(16), scaled(32))
    large = partial(models.all_conv, scaled(96), scaled(192))
    resnet, image = partial(models.resnet18, scaled(64)), (3, 32, 32)
    often = {"turn": PERIOD, "rounds": config.repeats, "few": config.repeats}
    seldom = {"turn": 1, "rounds": config.periods * PERIOD, "few": PERIOD}
    return {
        "mlp": Net(mlp, (scaled(784),), on_mlp, periodic, **often),
        "cnn9_16_32": Net(small, image, on_conv, periodic, **often),
        "cnn9_96_192": Net(large, image, on_conv, periodic, **seldom),
        "resnet18": Net(resnet, image, on_conv, periodic, **seldom),
    }
