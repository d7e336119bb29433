"""Splits of the digits: a few to train on, many to learn penalties from, others to report on."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from experiments import data


@dataclass(frozen=True)
class Sizes:
    """How many digits each part of a split has."""

    training: int = 500  # to train on
    validation: int = 8000  # whose loss penalties are learned from
    held: int = 2000  # by which the step of learning is chosen
    test: int = 10_000  # to report on

    @property
    def drawn(self) -> int:
        return self.training + self.validation + self.held


class Part(NamedTuple):
    """Digits as rows of pixels from 0 to 1, and the class of each."""

    images: Tensor
    labels: Tensor


class Split(NamedTuple):
    """Digits of one split; no two parts share one.

    training: those that every method trains on.
    validation: those whose loss after training penalties are learned from.
    held: those by which a step of learning is chosen; nothing is differentiated on them.
    test: those that nothing is chosen by.
    """

    training: Part
    validation: Part
    held: Part
    test: Part

    @property
    def chosen_by(self) -> Part:
        """All digits by which penalties may be learned and chosen."""
        return joined(self.validation, self.held)

    @property
    def all_but_test(self) -> Part:
        return joined(self.training, self.validation, self.held)


def split(name: data.Name, folder: Path | None, sizes: Sizes, seed: int) -> Split:
    """Return the split that a seed draws from a dataset's training digits; the test digits are its own."""
    found = data.load(name, folder)
    order = torch.randperm(len(found.training.labels), generator=Generator().manual_seed(seed))
    training, validation, held = order[: sizes.drawn].split([sizes.training, sizes.validation, sizes.held])
    return Split(
        training=part(found.training, training),
        validation=part(found.training, validation),
        held=part(found.training, held),
        test=part(found.test, torch.arange(sizes.test)),
    )


def part(digits: data.Images, chosen: Tensor) -> Part:
    return Part(digits.images[chosen].flatten(1).to(torch.get_default_dtype()) / 255, digits.labels[chosen])


def joined(*parts: Part) -> Part:
    return Part(torch.cat([x.images for x in parts]), torch.cat([x.labels for x in parts]))


def shortage(name: data.Name, folder: Path | None, sizes: Sizes) -> str | None:
    """Return in what a dataset has fewer digits than are asked for, if it has."""
    found = data.load(name, folder)
    training, test = len(found.training.labels), len(found.test.labels)
    if sizes.drawn <= training and sizes.test <= test:
        return None
    return (
        f"{name} has {training} training and {test} test digits; {sizes.drawn} to train on and to choose by, "
        f"and {sizes.test} to test on were asked for. Ask for fewer."
    )
