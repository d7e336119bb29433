"""Digits of which half have a wrong label, a network that is trained on them, and how well it does."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import cross_entropy, linear

from experiments.data import Dataset, Images
from metafop import Carry, Meta, Momentum, Training, functional
from metafop.optimizers import Unit
from metafop.types import Params

CLASSES = 10
MOMENTUM = 0.9
L2 = 1e-3  # of all parameters, in every run
Batch = tuple[Tensor, Tensor]  # images, (n, pixels), and labels


class Digits(NamedTuple):
    """Digits to train on, to validate by and to test by, and which of the first have a wrong label."""

    training: Batch
    validation: Batch
    test: Batch
    wrong: Tensor


class Problem(NamedTuple):
    """The digits, and a training of weighted examples before its first step."""

    digits: Digits
    training: Training
    meta: Meta
    carry: Carry


def digits(dataset: Dataset, examples: int, generator: Generator) -> Digits:
    """Draw training and validation digits, none twice, and give half of the first, exactly, a wrong label."""
    if len(dataset.training.labels) < 2 * examples:
        raise SystemExit(
            f"There are {len(dataset.training.labels)} training images, and --examples {examples} asks for "
            f"{2 * examples}. Pass a smaller number."
        )
    own, held_out = torch.randperm(len(dataset.training.labels), generator=generator)[: 2 * examples].chunk(2)
    wrong = torch.randperm(examples, generator=generator) < examples // 2
    others = torch.randint(1, CLASSES, (examples,), generator=generator)  # each wrong label is as probable
    images, labels = batch(dataset.training, own)
    return Digits(
        training=(images, torch.where(wrong, (labels + others) % CLASSES, labels)),
        validation=batch(dataset.training, held_out),
        test=batch(dataset.test, torch.arange(len(dataset.test.labels))),
        wrong=wrong,
    )


def batch(images: Images, chosen: Tensor) -> Batch:
    return images.images[chosen].flatten(1) / 255, images.labels[chosen]


def problem(found: Digits, hidden: tuple[int, ...], lr: float, generator: Generator) -> Problem:
    """Return a training in which every example starts with a weight of a half."""
    examples, pixels = found.training[0].shape
    params = start((pixels, *hidden, CLASSES), generator)
    training = Training(functional.plain(weighted), Momentum(), loss_domains={"weights": Unit()})
    leaves = {"weights": torch.full((examples,), 0.5), "l2": L2}
    meta = training.init_meta(params, lr=lr, momentum=MOMENTUM, loss=leaves)
    return Problem(found, training, meta, training.init(params))


def at_rate(problem: Problem, lr: float) -> Problem:
    """Return the same problem with another learning rate."""
    hyper = problem.meta.hyper._replace(lr=torch.tensor(lr))
    return problem._replace(meta=problem.meta._replace(hyper=hyper))


def start(widths: tuple[int, ...], generator: Generator) -> Params:
    """Return normal weights of variance 1 / inputs, and biases of zero."""
    params = {}
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        params[f"{i}.weight"] = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        params[f"{i}.bias"] = torch.zeros(outputs)
    return params


def logits(params: Params, images: Tensor) -> Tensor:
    """Return those of a perceptron, of as many layers as there are weights."""
    for i in range(len(params) // 2):
        images = linear(images if i == 0 else images.relu(), params[f"{i}.weight"], params[f"{i}.bias"])
    return images


def weighted(params: Params, batch: Batch, leaves: dict[str, Tensor]) -> Tensor:
    """Σ w_i ℓ_i / n + l2 ‖θ‖² / 2"""
    losses = cross_entropy(logits(params, batch[0]), batch[1], reduction="none")
    return (leaves["weights"] * losses).mean() + leaves["l2"] / 2 * sum(
        p.square().sum() for p in params.values()
    )


def clean(params: Params, batch: Batch) -> Tensor:
    """The loss of validation digits, by which weights are learned."""
    return cross_entropy(logits(params, batch[0]), batch[1])


def accuracy(params: Params, batch: Batch) -> float:
    """Return in percent how many digits are recognized."""
    return 100 * (logits(params, batch[0]).argmax(1) == batch[1]).double().mean().item()


def f1(weights: Tensor, wrong: Tensor) -> float:
    """Return that of "its weight is below a half" as a test for a wrong label."""
    found = weights < 0.5
    return 2 * (found & wrong).sum().item() / (found.sum() + wrong.sum()).item()
