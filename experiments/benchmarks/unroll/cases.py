"""What is unrolled: a network, its optimizer, and batches from which it can learn."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.benchmarks.unroll.rules import HEAVY_BALL, Rule

Batch = tuple[Tensor, Tensor]
Draw = Callable[[int, int, Generator], list[Batch]]  # so many batches of a size

CLASSES = 10


class Unroll(NamedTuple):
    """What every method starts from: a model, its optimizer, batches of the steps and of the outer loss."""

    model: nn.Module
    rule: Rule
    batches: list[Batch]
    outer: Batch


class Case(NamedTuple):
    """A network, what it is given, for how many steps, and in how many rounds this is measured."""

    model: Callable[[], nn.Module]
    draw: Draw
    batch: int
    horizon: int
    rounds: int
    rule: Rule = HEAVY_BALL

    def unroll(self, seed: int) -> Unroll:
        torch.manual_seed(seed)  # nn.Module draws its first weights from the global generator
        generator = Generator().manual_seed(seed)
        *batches, outer = self.draw(self.horizon + 1, self.batch, generator)
        return Unroll(self.model(), self.rule, batches, outer)


def convnet(channels: int) -> nn.Sequential:
    """Return three 3×3 layers with batch norm, the mean over positions, and a linear layer."""
    layers: list[nn.Module] = []
    for (inputs, outputs), stride in zip(
        pairwise([3, channels, 2 * channels, 2 * channels]), [1, 2, 2], strict=True
    ):
        conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, CLASSES))


def images(*shape: int) -> Draw:
    """Return a function that draws noise around the center of a class, and the class.

    Something to learn, slowly: otherwise terms cancel, and float32 leaves little of a derivative.
    """

    def draw(count: int, size: int, generator: Generator) -> list[Batch]:
        centers = torch.randn(CLASSES, *shape, generator=generator)
        labels = torch.randint(CLASSES, (count, size), generator=generator)
        return [(centers[y] + torch.randn(size, *shape, generator=generator), y) for y in labels]

    return draw


def batch_loss(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])
