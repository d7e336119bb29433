"""The datasets of the experiments, by name: published ones, checked by their md5, and generated ones."""

from functools import cache
from pathlib import Path
from typing import Literal

from experiments.data import cifar, files, generated, mnist
from experiments.data.images import Dataset, Images

__all__ = ["Dataset", "Images", "Name", "load"]

Name = Literal["mnist", "cifar10", "generated", "generated-digits"]


def load(name: Name, data: Path | None = None) -> Dataset:
    """Return a dataset; a published one from `data`, else METAFOP_DATA, else fetched into the user's cache.

    Asked again, a process returns the same tensors: they are not to be changed.
    """
    return loaded(name, files.named(data))


@cache
def loaded(name: Name, folder: Path | None) -> Dataset:
    """Return a dataset; a published one from the folder, or from the user's cache if it is None."""
    match name:
        case "mnist":
            return mnist.load(folder)
        case "cifar10":
            return cifar.load(folder)
        case "generated":
            return generated.generated()
        case "generated-digits":
            return generated.generated(shape=(1, 28, 28))
