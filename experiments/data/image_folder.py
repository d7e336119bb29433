"""Images in ImageNet's layout, one folder a class: listed, read, cropped, and written for a trial."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils import data

from experiments.data.images import Dataset

LAYOUT = "train/<class>/*.JPEG and val/<class>/*.JPEG (or .jpg, .png)"
SUFFIXES = (".jpg", ".jpeg", ".png")
MEAN = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float32)[:, None, None]
DEVIATION = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float32)[:, None, None]
AREA = (0.08, 1.0)  # of an image, that a crop takes
RATIO = (3 / 4, 4 / 3)  # of the width of a crop to its height
TRIES = 10  # for a crop that fits


class Sample(NamedTuple):
    """An image file, and the place of its class among all, sorted."""

    path: str
    label: int


class Listing(NamedTuple):
    """The classes, sorted, and the images of each split."""

    classes: list[str]
    training: list[Sample]
    validation: list[Sample]


def listing(root: Path) -> Listing:
    """Return the images in `root/train/<class>/` and `root/val/<class>/`."""
    names = classes(root / "train")
    differing = sorted(set(names) ^ set(classes(root / "val")))
    if differing:
        raise SystemExit(
            f"{root / 'train'} and {root / 'val'} must have the same classes, and {len(differing)} are in "
            f"one of them alone, as {differing[0]!r}. Add their folders, or remove them, to have {LAYOUT}."
        )
    return Listing(names, samples(root / "train", names), samples(root / "val", names))


def classes(split: Path) -> list[str]:
    """Return the names of the folders in a split, sorted."""
    names = sorted(path.name for path in split.iterdir() if path.is_dir()) if split.is_dir() else []
    if not names:
        raise SystemExit(f"{split} holds no folder of images. Name a folder that holds {LAYOUT}.")
    return names


def samples(split: Path, names: Sequence[str]) -> list[Sample]:
    """Return the images of a split, class by class."""
    found = [
        Sample(os.path.join(split, name, file), label)
        for label, name in enumerate(names)
        for file in sorted(os.listdir(split / name))
        if file.lower().endswith(SUFFIXES)
    ]
    if not found:
        raise SystemExit(f"The folders in {split} hold no images. Name a folder that holds {LAYOUT}.")
    return found


class Folder(data.Dataset[tuple[Tensor, int]]):
    """Images (3, size, size), standardised by ImageNet's mean and deviation, and their labels.

    Asked for by (index, epoch). The crop and the flip of a training image come from the seed, the epoch and
    the index alone: they are the same whichever process draws them, and wherever a run was resumed.
    """

    def __init__(self, samples: Sequence[Sample], size: int, train: bool, seed: int) -> None:
        self.samples = samples
        self.size = size
        self.train = train
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        index, epoch = key
        path, label = self.samples[index]
        image = opened(path)
        if self.train:
            # As text, a seed is hashed: near ones draw nothing alike.
            image = augmented(image, self.size, Random(f"{self.seed} {epoch} {index}"))
        else:
            image = centred(image, self.size)
        values = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.float32) / 255
        return (values - MEAN) / DEVIATION, label


def opened(path: str) -> Image.Image:
    """Return an image in red, green and blue."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # a damaged file makes Pillow's decoders raise errors of many kinds
        raise RuntimeError(f"Cannot read the image {path} ({error}). Replace or remove the file.") from None


def augmented(image: Image.Image, size: int, random: Random) -> Image.Image:
    """Return a part of random place, area and ratio, resized to `size`, and mirrored half of the time."""
    resized = image.resize((size, size), Image.Resampling.BILINEAR, box=crop(*image.size, random))
    return resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else resized


def crop(width: int, height: int, random: Random) -> tuple[int, int, int, int]:
    """Return the left, upper, right and lower end of a crop (Szegedy et al., 2015)."""
    for _ in range(TRIES):
        area = width * height * random.uniform(*AREA)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = random.randint(0, width - w), random.randint(0, height - h)
            return left, upper, left + w, upper + h
    # The largest in the middle whose ratio is allowed.
    w, h = min(width, max(1, round(height * RATIO[1]))), min(height, max(1, round(width / RATIO[0])))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


def centred(image: Image.Image, size: int) -> Image.Image:
    """Return the middle of an image whose shorter side is resized to 256 for a `size` of 224."""
    scale = size * 256 / 224 / min(image.size)
    width, height = (round(side * scale) for side in image.size)
    left, upper = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, upper, left + size, upper + size))


def write(root: Path, dataset: Dataset, size: int, training: int, test: int) -> None:
    """Write the first images of a dataset in this layout, as PNG, resized to `size`."""
    names = [f"{label:04d}" for label in range(int(dataset.training.labels.max()) + 1)]
    for name, images, count in (("train", dataset.training, training), ("val", dataset.test, test)):
        if count > len(images.labels):
            raise SystemExit(
                f"{count} images were asked for in {root / name}, and the dataset has {len(images.labels)}: "
                "ask for fewer."
            )
        for folder in names:
            (root / name / folder).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            values = images.images[i].permute(1, 2, 0).squeeze(-1).numpy()
            image = Image.fromarray(values).resize((size, size), Image.Resampling.BILINEAR)
            image.save(root / name / names[int(images.labels[i])] / f"{i:06d}.png")
