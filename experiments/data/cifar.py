"""CIFAR-10 (Krizhevsky, 2009): 60,000 photographs of ten kinds of things, 32 by 32 pixels."""

from pathlib import Path

import torch

from experiments.data import files
from experiments.data.images import Dataset, Images

SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes: the label, then red, green and blue, row by row
TEST = "test_batch.bin"

ARCHIVES = (
    files.Archive(
        folder="cifar10",
        name="cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        addresses=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
        contents={
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            TEST: "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
    ),
)


def load(folder: Path | None) -> Dataset:
    """Return the 50,000 and the 10,000 photographs, from a folder of all data, else from the user's cache."""
    (archive,) = ARCHIVES
    contents = files.read(archive, folder)
    training = b"".join(contents[name] for name in archive.contents if name != TEST)
    return Dataset(records(training), records(contents[TEST]))


def records(content: bytes) -> Images:
    """Return the images of a batch, and their labels."""
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, RECORD)
    return Images(values[:, 1:].reshape(-1, *SHAPE), values[:, 0].long())
