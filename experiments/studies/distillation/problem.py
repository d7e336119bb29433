"""A network that is trained on ten images, which are leaves of its loss, to be judged by real digits."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.studies.distillation.config import Config
from experiments.vision import models
from experiments.vision.task import Labelled, Split, split
from metafop import SGD, Carry, Scheduled, Training, functional
from metafop.types import Loss, Params

CLASSES = 10


class Problem(NamedTuple):
    """Real digits, the training on ten images, the loss and the accuracy on real digits, the known start."""

    digits: Split
    training: Training
    loss: Loss
    accuracy: Loss
    start: Params

    def outer_loss(self, digits: Labelled) -> Callable[[Carry], Tensor]:
        return lambda carry: self.loss(carry.params, {}, digits)[0]

    def percent(self, params: Params, digits: Labelled) -> float:
        return 100 * self.accuracy(params, {}, digits)[0].item()


def make_problem(config: Config) -> Problem:
    model = network(config.hidden)
    training_loss, loss, accuracy = (
        functional.from_module(model, each)[0] for each in (loss_on_images, loss_on_digits, share_right)
    )
    return Problem(
        split(config.source, config.images, config.validation, config.test, pool=1),
        Training(training_loss, Scheduled(SGD(), config.steps)),
        loss,
        accuracy,
        draw_start(config, Generator().manual_seed(config.seed)),
    )


def loss_on_images(model: nn.Module, labels: Tensor, leaves: Mapping[str, Tensor]) -> Tensor:
    return cross_entropy(model(leaves["images"]), labels)


def loss_on_digits(model: nn.Module, digits: Labelled) -> Tensor:
    return cross_entropy(model(digits.images), digits.labels)


def share_right(model: nn.Module, digits: Labelled) -> Tensor:
    return (model(digits.images).argmax(1) == digits.labels).float().mean()


def network(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), models.mlp(28 * 28, hidden, CLASSES)).float()


def draw_start(config: Config, generator: Generator) -> Params:
    """Return the first weights of a new network."""
    seed = int(torch.randint(2**31, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # nn.Module draws its first weights from the global generator
        return {name: p.detach() for name, p in network(config.hidden).named_parameters()}


def draw_digits(config: Config, problem: Problem, generator: Generator) -> Labelled:
    images, labels = problem.digits.training
    chosen = torch.randint(len(labels), (config.batch,), generator=generator)
    return Labelled(images[chosen], labels[chosen])


def noise(generator: Generator) -> Tensor:
    return torch.randn(CLASSES, 1, 28, 28, generator=generator, dtype=torch.float32)


def means(problem: Problem) -> Tensor:
    """Return the mean real digit of each class."""
    images, labels = problem.digits.training
    return torch.stack([images[labels == each].mean(0) for each in range(CLASSES)])


def batches(config: Config) -> list[Tensor]:
    """Return what each step is given besides: the classes of the ten images, which are themselves in meta."""
    return config.steps * [torch.arange(CLASSES)]
