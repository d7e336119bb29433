"""MNIST (LeCun et al., 1998): 70,000 handwritten digits of 28 by 28 pixels."""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from experiments.data import files
from experiments.data.images import Dataset, Images

ADDRESSES = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
SIDE = 28


def published(name: str, packed: str, unpacked: str) -> files.Archive:
    addresses = tuple(f"{address}{name}.gz" for address in ADDRESSES)
    return files.Archive("mnist", f"{name}.gz", packed, addresses, {name: unpacked})


ARCHIVES = (
    published(
        "train-images-idx3-ubyte",
        packed="f68b3c2dcbeaaa9fbdd348bbdeb94873",
        unpacked="6bbc9ace898e44ae57da46a324031adb",
    ),
    published(
        "train-labels-idx1-ubyte",
        packed="d53e105ee54ea40749a09fcbcd1e9432",
        unpacked="a25bea736e30d166cdddb491f175f624",
    ),
    published(
        "t10k-images-idx3-ubyte",
        packed="9fb629c4189551a2d022fa330f9573f3",
        unpacked="2646ac647ad5339dbf082846283269ea",
    ),
    published(
        "t10k-labels-idx1-ubyte",
        packed="ec29112dd5afa0611ce80d1b7f02629c",
        unpacked="27ae3e4e09519cfbb04c329615203637",
    ),
)


def load(folder: Path | None) -> Dataset:
    """Return the 60,000 and the 10,000 digits, from a folder of all data, else from the user's cache."""
    contents: dict[str, bytes] = {}
    for archive in ARCHIVES:
        contents |= files.read(archive, folder)

    def part(prefix: str) -> Images:
        images = idx(f"{prefix}-images-idx3-ubyte", contents[f"{prefix}-images-idx3-ubyte"], (SIDE, SIDE))
        labels = idx(f"{prefix}-labels-idx1-ubyte", contents[f"{prefix}-labels-idx1-ubyte"], ())
        return Images(images[:, None], labels.long())

    return Dataset(part("train"), part("t10k"))


def idx(name: str, content: bytes, item: tuple[int, ...]) -> Tensor:
    """Return the items of an IDX file. It begins with 0, 0, 8 for bytes, the number of sizes, and these."""
    count = max(len(content) - 4 * (2 + len(item)), 0) // math.prod(item)
    header = struct.pack(f">4B{1 + len(item)}I", 0, 0, 8, 1 + len(item), count, *item)
    if not content.startswith(header) or len(content) != len(header) + count * math.prod(item):
        raise SystemExit(
            f"{name} is no IDX file of bytes in items of size {item}: it has {len(content)} bytes, "
            f"and begins with {content[: len(header)].hex()}. Take the file that is published."
        )
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=len(header))
    return values.view(count, *item)
