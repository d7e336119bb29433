"""CIFAR-10 from a folder that the user names: the published binary batches, unpacked or in a tar."""

import os
import tarfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor

FOLDER = "METAFOP_DATA"  # the environment variable for where no --data is given
TRAINING = [f"data_batch_{i}.bin" for i in range(1, 6)]
TEST = "test_batch.bin"
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes: the label, then red, green and blue, row by row


class Cifar(NamedTuple):
    """Images (n, 3, 32, 32), standardised by the mean and deviation of each colour of the training ones."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(data: Path | None, images: int, test_images: int) -> Cifar:
    """Return the first images, and the first test images, of `cifar10/` in `data`, else in METAFOP_DATA."""
    folder = data or (Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None)
    if folder is None:
        raise SystemExit(
            f"CIFAR-10 is needed: name the folder that holds cifar10/ (with {TRAINING[0]} and so on, or with "
            f"their .tar.xz or .tar.gz) by --data or the environment variable {FOLDER}."
        )
    files = read(folder / "cifar10")
    x, y = records(b"".join(files[name] for name in TRAINING), images, "training")
    test_x, test_y = records(files[TEST], test_images, "test")
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return Cifar((x - mean) / deviation, y, (test_x - mean) / deviation, test_y)


def read(folder: Path) -> dict[str, bytes]:
    """Return the content of the six batches by name, from wherever in the folder they are, or from a tar."""
    files = {path.name: path.read_bytes() for path in folder.rglob("*.bin") if path.name in [*TRAINING, TEST]}
    archives = [path for path in sorted(folder.glob("*.tar.*")) if path.suffix in (".xz", ".gz")]
    if not files and archives:
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                name, content = PurePosixPath(member.name).name, archive.extractfile(member)
                if name in [*TRAINING, TEST] and content is not None:
                    files[name] = content.read()
    missing = [name for name in [*TRAINING, TEST] if name not in files]
    if missing:
        raise SystemExit(
            f"CIFAR-10 is not in {folder}: looked for {', '.join(missing)}, there and "
            "in a .tar.xz or .tar.gz; name the folder that holds cifar10/ by --data or the environment "
            f"variable {FOLDER}."
        )
    return files


def records(content: bytes, count: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return the first `count` images, from 0 to 1, and their labels."""
    if len(content) % RECORD or len(content) < count * RECORD:
        raise SystemExit(
            f"CIFAR-10 has {len(content) / RECORD:g} {kind} images here, and {count} were asked for: "
            "ask for fewer, or unpack the batches again if that is no whole number."
        )
    values = torch.frombuffer(bytearray(content[: count * RECORD]), dtype=torch.uint8).view(count, RECORD)
    return values[:, 1:].reshape(count, *SHAPE).float() / 255, values[:, 0].long()
