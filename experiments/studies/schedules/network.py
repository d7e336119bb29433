"""A small network on digits, its trainings from random starts, and what of them is learned."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy

from experiments import data
from metafop import Momentum, Scheduled, Training
from metafop.optimizers import Positive
from metafop.types import Buffers, Carry, Meta, Params, Tree

SCHEDULED = ("lr", "momentum")
BIASES = 0.05  # deviation of the first biases, before their scale is learned


class Digits(NamedTuple):
    """Images as rows of pixels from 0 to 1, and the class of each."""

    images: Tensor
    labels: Tensor


class Draws(NamedTuple):
    """What is random in some trainings, all of them in the first dimension.

    noise: the first parameters, by name, before they are scaled.
    order: the numbers of the digits in each batch, (trainings, steps, batch).
    """

    noise: Params
    order: Tensor

    @property
    def at_rest(self) -> Params:
        """A displacement of zero from the start, of one training."""
        return {k: torch.zeros_like(x[0]) for k, x in self.noise.items()}


class Results(NamedTuple):
    """How trainings end: the loss on all training and on all test digits, the accuracy in % on the latter.

    Each is (draws, metas).
    """

    training: Tensor
    test: Tensor
    accuracy: Tensor


@dataclass(frozen=True)
class Network:
    """Layers with tanh between them, trained by momentum, as Maclaurin et al. (2015) have them."""

    widths: tuple[int, ...] = (784, 50, 50, 50, 10)  # pixels, hidden units, classes
    steps: int = 100
    batch: int = 200
    images: int = 10_000  # to train on

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name: weights and biases of layers 1, 2, …"""
        found: dict[str, tuple[int, ...]] = {}
        for i, (inputs, outputs) in enumerate(zip(self.widths, self.widths[1:], strict=False), 1):
            found |= {f"weights{i}": (inputs, outputs), f"biases{i}": (outputs,)}
        return found

    def draw(self, count: int, generator: Generator) -> Draws:
        """Return what is random in so many trainings; batches go through all digits, then again."""
        noise = {k: torch.randn(count, *shape, generator=generator) for k, shape in self.shapes.items()}
        epochs = math.ceil(self.steps * self.batch / self.images)
        orders = [
            torch.cat([torch.randperm(self.images, generator=generator) for _ in range(epochs)])
            for _ in range(count)
        ]
        order = torch.stack(orders)[:, : self.steps * self.batch]
        return Draws(noise, order.view(count, self.steps, self.batch))

    def training(self) -> Training:
        """Return the training of the displacement from the start, which is noise times scales of meta.

        So where training starts is what its loss is given, and may be learned like the rest of it.
        """
        optimizer = Scheduled(Momentum(), self.steps, SCHEDULED)
        return Training(loss, optimizer, loss_domains={"*": Positive(zero=False)})

    def init_meta(self, training: Training, lr: float, momentum: float) -> Meta:
        """Return constant schedules for each parameter, and the usual scales: 1/√inputs for weights."""
        scales = {k: s[0] ** -0.5 if len(s) == 2 else BIASES for k, s in self.shapes.items()}
        lrs, momenta = dict.fromkeys(self.shapes, lr), dict.fromkeys(self.shapes, momentum)
        rest = {k: torch.zeros(shape) for k, shape in self.shapes.items()}
        return training.init_meta(rest, loss=scales, lr=lrs, momentum=momenta)


def loss(displacement: Params, noise: Buffers, digits: Digits, scales: Tree) -> tuple[Tensor, Buffers]:
    """Return the cross entropy at θ = scale · noise + displacement, and the noise, which stays."""
    return cross_entropy(scores(displacement, noise, digits.images, scales), digits.labels), noise


def scores(displacement: Params, noise: Buffers, images: Tensor, scales: Tree) -> Tensor:
    units, layers = images, len(displacement) // 2
    for i in range(1, layers + 1):
        weights, biases = (scales[k] * noise[k] + displacement[k] for k in (f"weights{i}", f"biases{i}"))
        units = units @ weights + biases
        units = units.tanh() if i < layers else units
    return units


def trained(training: Training, metas: Meta, draws: Draws, digits: Digits) -> Carry:
    """Return the carries after training with each of many metas, on each of the draws: (draws, metas, …)."""
    rest = training.init(draws.at_rest)
    each = vmap(lambda noise: vmap(lambda _: rest._replace(buffers=noise))(metas))

    def step(meta: Meta, carry: Carry, batch: Digits) -> Carry:
        return training.step(meta, carry, batch)[0]

    steps = vmap(vmap(step, in_dims=(0, 0, None)), in_dims=(None, 0, 0))
    carry = each(draws.noise)
    for batch in batches(digits, draws):
        carry = steps(metas, carry, batch)
    return carry


def losses(metas: Meta, carry: Carry, digits: Digits) -> Tensor:
    """Return the loss of each network on the same digits: (draws, metas)."""

    def one(meta: Meta, carry: Carry) -> Tensor:
        return loss(carry.params, carry.buffers, digits, meta.loss)[0]

    return vmap(vmap(one), in_dims=(None, 0), chunk_size=1)(metas, carry)


def accuracies(metas: Meta, carry: Carry, digits: Digits) -> Tensor:
    """Return the percentage of digits that each network recognises: (draws, metas)."""

    def one(meta: Meta, carry: Carry) -> Tensor:
        found = scores(carry.params, carry.buffers, digits.images, meta.loss).argmax(1)
        return 100 * (found == digits.labels).float().mean()

    return vmap(vmap(one), in_dims=(None, 0), chunk_size=1)(metas, carry)


def results(training: Training, metas: Meta, draws: Draws, digits: Digits, test: Digits) -> Results:
    """Train with each of many metas on each of the draws, and look at all digits in the end."""
    carry = trained(training, metas, draws, digits)
    return Results(losses(metas, carry, digits), losses(metas, carry, test), accuracies(metas, carry, test))


def batches(digits: Digits, draws: Draws) -> Sequence[Digits]:
    """Return the batch of each step, of all trainings together."""
    return [Digits(digits.images[chosen], digits.labels[chosen]) for chosen in draws.order.unbind(1)]


def digits(name: data.Name, folder: Path | None, images: int, test: int) -> tuple[Digits, Digits]:
    """Return the first so many digits to train on and to test by, or refuse what is not there."""
    found = data.load(name, folder)
    for what, part, count in (("training", found.training, images), ("test", found.test, test)):
        if count > len(part.labels):
            raise SystemExit(
                f"{name} has {len(part.labels)} {what} digits, {count} were asked for. Ask for fewer."
            )
    return rows(found.training, images), rows(found.test, test)


def rows(digits: data.Images, count: int) -> Digits:
    return Digits(digits.images[:count].flatten(1).to(torch.get_default_dtype()) / 255, digits.labels[:count])
