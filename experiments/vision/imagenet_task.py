"""One network trained on images in files, read by other processes: the run of the study on ImageNet."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from experiments.data import image_folder
from experiments.vision import models
from experiments.vision.loading import loader
from experiments.vision.loop import Loop, Order
from experiments.vision.methods import Method

ROOT, LOADERS = "METAFOP_IMAGES", "METAFOP_LOADERS"  # set by `prepare`, read by worker processes


@dataclass(frozen=True)
class ImageSet:
    """What identifies a set of images, wherever its folder is."""

    images: int  # to train on
    validation: int
    classes: int
    names: str  # a hash of the names of all


def prepare(root: Path, loaders: int) -> ImageSet:
    """Set the folder of images, and how many processes read for each run, for this process and its workers.

    Raises SystemExit at once if the folder does not have the layout of ImageNet.
    """
    os.environ |= {ROOT: str(root.absolute()), LOADERS: str(loaders)}
    listed.cache_clear()
    return found(listed(root.absolute()), root.absolute())


@lru_cache(maxsize=1)
def listed(root: Path) -> image_folder.Listing:
    return image_folder.listing(root)


def found(listing: image_folder.Listing, root: Path) -> ImageSet:
    names = hashlib.sha256()
    for sample in (*listing.training, *listing.validation):
        names.update(sample.path.removeprefix(str(root)).encode() + b"\0")
    return ImageSet(
        len(listing.training), len(listing.validation), len(listing.classes), names.hexdigest()[:16]
    )


@dataclass(frozen=True)
class ImageNetTask:
    """The settings of a run."""

    kind: ClassVar[str] = "experiments.image_files"

    method: Method
    seed: int  # of the first weights, and of the order and the crops of the images
    found: ImageSet
    epochs: int
    decays: tuple[float, ...]  # epochs after which the learning rate is divided by ten
    size: int
    width: int
    batch: int
    weight_decay: float
    half: bool

    @property
    def name(self) -> str:
        return f"{self.method.name}-seed{self.seed}"

    def start(self) -> Loop:
        root, loaders = Path(os.environ[ROOT]), int(os.environ[LOADERS])
        listing = listed(root)
        if found(listing, root) != self.found:
            raise RuntimeError(
                f"The images in {root} are not those of this run, {self.found}. Put them back, or start the "
                "study again, with the images that are there now."
            )
        # A resumed run is to end with the same bits, on an accelerator too.
        if torch.cuda.is_available():
            torch.backends.cudnn.deterministic = True
        model = self.network().to(device())
        optimizer = self.method.optimizer(model, self.seed)
        for group in optimizer.param_groups:
            group["weight_decay"] = self.weight_decay
        training = image_folder.Folder(listing.training, self.size, train=True, seed=self.seed)
        validation = image_folder.Folder(listing.validation, self.size, train=False, seed=self.seed)
        return Loop(
            model,
            optimizer,
            FileFeed(training, self.batch, self.seed, loaders),
            validation=lambda: once(validation, self.batch, loaders),
            test=None,
            epochs=self.epochs,
            decays=self.decays,
            half=half_precision() if self.half else None,
        )

    def network(self) -> nn.Sequential:
        """Return the network with the first weights of this seed."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)  # nn.Module draws its first weights from the global generator
            net = models.resnet18(self.width, classes=self.found.classes, large=True).float()
        # A convolution on a CPU takes two thirds of the time with channels last.
        return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def half_precision() -> torch.dtype:
    """Return bfloat16, or float16 on an accelerator that has no other."""
    lacking = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if lacking else torch.bfloat16


class FileFeed:
    """A feed of images in files. It reads ahead; its saved place is that of the last batch it gave."""

    def __init__(self, images: image_folder.Folder, batch: int, seed: int, loaders: int) -> None:
        self._order = Order(len(images), batch, seed)
        self._loader = loader(images, RemainingBatches(self._order), loaders, lasting=True)
        self._coming: Iterator[tuple[Tensor, Tensor]] = iter(())

    @property
    def steps(self) -> int:
        return self._order.steps

    def __next__(self) -> tuple[Tensor, Tensor]:
        if not len(self._order.rest):
            self._order.begin()
            self._coming = iter(self._loader)
        images, labels = ready(next(self._coming))
        self._order.place += 1
        return images, labels

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state)
        self._coming = iter(self._loader)


class RemainingBatches:
    """The batches that are left of an epoch, of images by index and epoch."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self._order.epoch
        for batch in self._order.rest:
            yield [(index, epoch) for index in batch.tolist()]


def once(images: image_folder.Folder, batch: int, loaders: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every image once, in order."""
    keys = [(index, 0) for index in range(len(images))]
    batches = [keys[i : i + batch] for i in range(0, len(keys), batch)]
    yield from map(ready, loader(images, batches, loaders, lasting=False))


def ready(batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    images, labels = (x.to(device(), non_blocking=True) for x in batch)
    return images.contiguous(memory_format=torch.channels_last), labels
