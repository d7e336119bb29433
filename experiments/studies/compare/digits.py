"""Handwritten digits (scikit-learn's: nothing to download), and a small network for each seed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Generator, Tensor
from torch.nn.functional import cross_entropy

from experiments.vision import models
from metafop import functional, tree
from metafop.types import Loss, Params


class Digits(NamedTuple):
    """A loss, and networks, stacked. A batch is the numbers of its images.

    Three in five images are for training, one to learn or choose how to train by, one to report.
    """

    loss: Loss
    networks: Params
    images: int

    def __repr__(self) -> str:
        return f"Digits({ ({k: tuple(x.shape) for k, x in self.networks.items()}) })"

    def validation(self, carry: Any) -> Tensor:
        """The loss on the images by which is learned how to train: the outer loss."""
        held = torch.arange(self.images * 3 // 5, self.images * 4 // 5)
        return self.loss(carry.params, carry.buffers, held)[0]

    def test(self, carry: Any) -> Tensor:
        """The loss on images that nothing was learned from."""
        held = torch.arange(self.images * 4 // 5, self.images)
        return self.loss(carry.params, carry.buffers, held)[0]

    def draw(self, shape: tuple[int, ...], generator: Generator) -> Tensor:
        """Return numbers of images to train on."""
        return torch.randint(self.images * 3 // 5, shape, generator=generator)

    def take(self, networks: Tensor) -> Params:
        """Return the parameters of some of the networks, by number."""
        return tree.map(lambda x: x[networks], self.networks)


def digits(hidden: int, networks: int, seed: int) -> Digits:
    """Return networks 64-`hidden`-10 of the seeds from `seed` on, and images in an order that it draws."""
    data: Any = load_digits()
    shuffled = torch.randperm(len(data.target), generator=Generator().manual_seed(seed))
    images, labels = torch.tensor(data.data)[shuffled], torch.tensor(data.target)[shuffled]
    images = (images - images.mean()) / images.std()

    def batch_loss(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        return cross_entropy(model(images[batch]), labels[batch])

    made = []
    for i in range(networks):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + i)  # nn.Module draws its first weights from the global generator
            made.append(functional.from_module(models.mlp(64, hidden, 10).double(), batch_loss))
    return Digits(made[0][0], tree.stack([params for _, params, _ in made]), len(images))
