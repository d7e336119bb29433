"""One network trained on images in memory: the run that the studies on MNIST and CIFAR-10 are made of."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from experiments import data
from experiments.vision import models
from experiments.vision.loop import InMemoryFeed, Loop
from experiments.vision.methods import Method

EVALUATION_BATCH = 500  # images


@dataclass(frozen=True)
class Classify:
    """The settings of a run. The images to train on are the first, those to validate on come after them."""

    kind: ClassVar[str] = "experiments.classify"

    method: Method
    seed: int  # of the first weights and of the order of the images
    data: data.Name
    images: int
    validation: int
    test: int  # test images, evaluated once, at the end; 0 while settings are being chosen
    model: Literal["mlp", "all-conv"]
    widths: tuple[int, ...]
    epochs: int
    decays: tuple[float, ...]  # epochs after which the learning rate is divided by ten
    batch: int = 128
    pool: int = 1  # side of the squares of pixels whose mean is taken
    judge_every: int = 0  # steps, for the validation images; 0: after every epoch
    angles_every: int = 0  # steps, for the angles between gradients and P times them
    keep_matrices: bool = False  # every P, each time that the validation images are evaluated

    @property
    def name(self) -> str:
        of = self.method
        parts = [of.name, f"lr{of.lr:g}"]
        parts += [f"momentum{of.momentum:g}"] if of.momentum != 0.9 else []
        parts += [f"meta{of.meta_lr:g}"] if of.meta_lr is not None else []
        parts += [f"rank{of.rank}"] if of.rank is not None else []
        return "-".join([*parts, f"seed{self.seed}"])

    def start(self) -> Loop:
        if torch.cuda.is_available():
            torch.backends.cudnn.deterministic = True  # or a resumed run would end with other bits
        parts = split(self.data, self.images, self.validation, self.test, self.pool)
        model = self.network(parts.training.images.shape[1:]).to(parts.training.images.device)
        return Loop(
            model,
            self.method.optimizer(model, self.seed),
            InMemoryFeed(*parts.training, self.batch, self.seed),
            validation=(lambda: batches(parts.validation)) if self.validation else None,
            test=(lambda: batches(parts.test)) if self.test else None,
            epochs=self.epochs,
            decays=self.decays,
            judge_every=self.judge_every,
            angles_every=self.angles_every,
            keep_matrices=self.keep_matrices,
        )

    def network(self, shape: torch.Size) -> nn.Module:
        """Return the network with the first weights of this seed."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)  # nn.Module draws its first weights from the global generator
            if self.model == "mlp":
                return nn.Sequential(nn.Flatten(), models.mlp(shape.numel(), *self.widths, 10)).float()
            narrow, wide = self.widths
            net = models.all_conv(narrow, wide, channels=shape[0]).float()
            return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def shortage(name: data.Name, images: int, validation: int, test: int) -> str | None:
    """Return in what a dataset has fewer images than are asked for, if it has."""
    found = data.load(name)
    training, tested = len(found.training.labels), len(found.test.labels)
    if images + validation <= training and test <= tested:
        return None
    return (
        f"{name} has {training} training and {tested} test images; {images} to train on, {validation} to "
        f"validate on and {test} to test on were asked for. Ask for fewer."
    )


class Labelled(NamedTuple):
    images: Tensor
    labels: Tensor


class Split(NamedTuple):
    training: Labelled
    validation: Labelled
    test: Labelled


@lru_cache(maxsize=2)
def split(name: data.Name, images: int, validation: int, test: int, pool: int) -> Split:
    """Return the parts, each channel standardised by the mean and deviation over the training part."""
    if why := shortage(name, images, validation, test):
        raise ValueError(why)
    found, asked = data.load(name), images + validation
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first = pooled(found.training.images[:asked], pool)
    last = pooled(found.test.images[:test], pool)
    mean = first[:images].mean((0, 2, 3), keepdim=True)
    deviation = first[:images].std((0, 2, 3), keepdim=True)
    labels = found.training.labels.to(device)

    def ready(pixels: Tensor) -> Tensor:
        # A convolution on a CPU takes two thirds of the time with channels last.
        return ((pixels - mean) / deviation).to(device).contiguous(memory_format=torch.channels_last)

    return Split(
        Labelled(ready(first[:images]), labels[:images]),
        Labelled(ready(first[images:]), labels[images:asked]),
        Labelled(ready(last), found.test.labels[:test].to(device)),
    )


def pooled(images: Tensor, pool: int) -> Tensor:
    return avg_pool2d(images.float() / 255, pool) if pool > 1 else images.float() / 255


def batches(part: Labelled) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(part.images.split(EVALUATION_BATCH), part.labels.split(EVALUATION_BATCH), strict=True)
