"""The published datasets, put into a folder: what is there and intact stays, the rest is downloaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from experiments.data import cifar, files, mnist

DATASETS = {"mnist": mnist, "cifar10": cifar}


@dataclass(frozen=True)
class Config:
    """Download MNIST and CIFAR-10, and check them by their md5; an altered file is replaced."""

    data: Path | None = None  # folder for mnist/ and cifar10/; if None, METAFOP_DATA, else the user's cache
    names: tuple[Literal["mnist", "cifar10"], ...] = ("mnist", "cifar10")  # datasets to fetch


def main(config: Config) -> None:
    """Download what has no intact copy, and say where it is."""
    folder = files.named(config.data) or files.cache()
    for name in config.names:
        for archive in DATASETS[name].ARCHIVES:
            files.fetch(archive, folder)
    places = ", ".join(f"{name} in {folder / name}" for name in config.names)
    Console(markup=False).print(f"Complete and intact: {places}.", soft_wrap=True)
