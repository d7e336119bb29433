"""What tests of FOP train, and how they compare what is left of it: models, optimizers, state dicts."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from problems import assert_same_bits, filled
from torch import Generator, Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from metafop.optim import FOP

# Bases whose step FOP knows, and one that it does not.
BASES = {
    "sgd": partial(FOP, optimizer_class=torch.optim.SGD, lr=0.05),
    "momentum": partial(FOP, optimizer_class=torch.optim.SGD, lr=0.05, momentum=0.9),
    "nesterov": partial(FOP, optimizer_class=torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": partial(FOP, optimizer_class=torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(FOP, optimizer_class=torch.optim.RMSprop, lr=0.005),
}
# All that is ever learned, at every step.
LEARNING = {
    "momentum, learned": partial(BASES["momentum"], interval=1, learn=("precond", "lr", "momentum")),
    "adamw, learned": partial(BASES["adamw"], interval=1, learn=("precond", "lr")),
}


@dataclass
class Task:
    """A model, and numbers that it is to learn."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    @property
    def params(self) -> list[Any]:
        return list(self.model.parameters())

    def loss(self) -> Tensor:
        return mse_loss(self.model(self.inputs), self.targets)

    def backward(self) -> Tensor:
        self.model.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def train(self, optimizer: Optimizer, steps: int) -> list[Tensor]:
        """Return the losses before each step."""
        losses = []
        for _ in range(steps):
            losses.append(self.backward())
            optimizer.step()
        return losses


def task(generator: Generator, dtype: torch.dtype = torch.float64) -> Task:
    """Return a network with a kernel, matrices and biases: one of each that FOP treats in its own way."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1)
    )
    model = filled(model, generator).to(dtype)
    inputs, targets = torch.randn(6, 1, 4, 4, generator=generator), torch.randn(6, 1, generator=generator)
    return Task(model, inputs.to(dtype), targets.to(dtype))


def kept(optimizer: Optimizer) -> dict[str, Any]:
    """Return a copy of all that an optimizer holds, parameters and gradients too."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in params]
    return deepcopy({"params": params, "grads": grads, **optimizer.state_dict()})


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Compare two nests of tensors, numbers and words: the same bits, in any order of keys."""
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
            assert_same(x, y, f"{where}/{i}")
    elif isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), where
        assert_same_bits(actual.detach(), expected.detach())
    else:
        assert type(actual) is type(expected), where
        assert actual == expected, where
