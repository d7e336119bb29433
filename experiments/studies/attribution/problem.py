"""A network that is trained on weighted digits: as it is, and again without some of them."""

from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy, linear

from experiments.data import Dataset, Images
from metafop import Carry, Meta, Momentum, Training, functional
from metafop.types import Params

UNITS, CLASSES = 64, 10
MOMENTUM, L2 = 0.9, 1e-3
PARTS = 10  # batches in an epoch
Batch = tuple[Tensor, Tensor, Tensor]  # images, (n, pixels), labels, and their places among all digits


class Problem(NamedTuple):
    """A training before its first step, its batches, all its digits as one, unseen ones, all test digits."""

    training: Training
    meta: Meta
    carry: Carry
    batches: list[Batch]
    everything: Batch
    unseen: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def problem(
    dataset: Dataset, examples: int, unseen: int, epochs: int, lr: float, generator: Generator
) -> Problem:
    images, labels = drawn(dataset.training, examples, generator)
    params = {
        "hidden.weight": torch.randn(UNITS, images.shape[1], generator=generator) / images.shape[1] ** 0.5,
        "hidden.bias": torch.zeros(UNITS),
        "weight": torch.randn(CLASSES, UNITS, generator=generator) / UNITS**0.5,
        "bias": torch.zeros(CLASSES),
    }
    training = Training(functional.plain(weighted), Momentum())
    leaves = {"weights": torch.ones(examples)}
    shuffled = drawn(dataset.test, len(dataset.test.labels), generator)
    orders = [torch.randperm(examples, generator=generator) for _ in range(epochs)]
    return Problem(
        training,
        training.init_meta(params, lr=lr, momentum=MOMENTUM, loss=leaves),
        training.init(params),
        [(images[part], labels[part], part) for order in orders for part in order.chunk(PARTS)],
        (images, labels, torch.arange(examples)),
        (shuffled[0][:unseen], shuffled[1][:unseen]),
        shuffled,
    )


def drawn(images: Images, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return so many images with their labels, none twice."""
    if count > len(images.labels):
        raise SystemExit(
            f"There are {len(images.labels)} images, and {count} are to be drawn. Pass a smaller number."
        )
    chosen = torch.randperm(len(images.labels), generator=generator)[:count]
    return images.images[chosen].flatten(1) / 255, images.labels[chosen]


def logits(params: Params, images: Tensor) -> Tensor:
    hidden = linear(images, params["hidden.weight"], params["hidden.bias"]).tanh()
    return linear(hidden, params["weight"], params["bias"])


def weighted(params: Params, batch: Batch, leaves: dict[str, Tensor]) -> Tensor:
    """Σ w_i ℓ_i / n + l2 ‖θ‖² / 2, over the n digits of a batch"""
    images, labels, places = batch
    losses = cross_entropy(logits(params, images), labels, reduction="none")
    penalty = sum(p.square().sum() for p in params.values())
    return (leaves["weights"][places] * losses).mean() + L2 / 2 * penalty


def losses(params: Params, unseen: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of each unseen digit."""
    return cross_entropy(logits(params, unseen[0]), unseen[1], reduction="none")


def accuracy(params: Params, batch: tuple[Tensor, Tensor]) -> float:
    """Return in percent how many digits are recognized."""
    return 100 * (logits(params, batch[0]).argmax(1) == batch[1]).double().mean().item()


def trained(problem: Problem) -> Carry:
    carry = problem.carry
    for batch in problem.batches:
        carry, _ = problem.training.step(problem.meta, carry, batch)
    return carry


def retrained(problem: Problem, weights: Tensor) -> Tensor:
    """Return each unseen digit's loss, (runs, unseen), after a run with each row of weights, side by side."""
    meta = problem.meta

    def step(weights: Tensor, carry: Carry, batch: Batch) -> Carry:
        carry, _ = problem.training.step(meta._replace(loss={"weights": weights}), carry, batch)
        return carry

    carry = vmap(lambda _: problem.carry)(weights)
    for batch in problem.batches:
        carry = vmap(step, in_dims=(0, 0, None))(weights, carry, batch)
    return vmap(lambda params: losses(params, problem.unseen))(carry.params)
