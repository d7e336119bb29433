"""The settings of bench-online."""

from dataclasses import dataclass
from pathlib import Path

from experiments.runner.settings import FromZero


@dataclass(frozen=True)
class Config:
    """Times one online step over one plain step, on an MLP, a 9-layer conv net and a small transformer."""

    repeats: int = 60  # rounds of measurement; in each, every case takes one step
    batch: int = 128  # examples in a batch
    narrow: int = 16  # channels of the conv net's first three layers
    wide: int = 32  # channels of the layers after
    layers: int = 2  # of the transformer
    width: int = 64  # of the transformer, a multiple of its 4 heads
    length: int = 32  # tokens in a sequence
    sequences: int = 8  # in a batch of the transformer
    compiled: bool = True  # measure under torch.compile too. Compiling takes about a minute a case
    threads: int = 1  # threads that torch may use
    seed: FromZero[int] = 0
    out: Path = Path("runs/bench-online")  # folder for summary.json, config.json and the times
