"""What tests of FOP train, and how they compare what is left of it: models, optimizers, state dicts."""

import io
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from problems import assert_same_bits, filled
from torch import Generator, Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from metafop.optim import FOP

IN_BOTH_PRECISIONS = pytest.mark.usefixtures("precision")
MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
MOMENTUMS = {
    "heavy ball": MOMENTUM,
    "heavy ball, decayed": MOMENTUM | {"weight_decay": 0.01},
    "nesterov": MOMENTUM | {"nesterov": True},
    "nesterov, decayed": MOMENTUM | {"nesterov": True, "weight_decay": 0.01},
    "heavy ball, maximized": MOMENTUM | {"maximize": True},
}
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
ALL = BASES | LEARNING
# Two of them by themselves.
PLAIN = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
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


def task(generator: Generator, dtype: torch.dtype | None = None) -> Task:
    """Return a network with a kernel, matrices and biases: one of each that FOP treats in its own way."""
    dtype = dtype or torch.get_default_dtype()
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1)
    )
    model = filled(model, generator).to(dtype)
    inputs, targets = torch.randn(6, 1, 4, 4, generator=generator), torch.randn(6, 1, generator=generator)
    return Task(model, inputs.to(dtype), targets.to(dtype))


def kernels(generator: Generator, format: torch.memory_format = torch.contiguous_format) -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 2, 3, 3, generator=generator).to(memory_format=format))


def weights(
    generator: Generator, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def take(optimizer: Optimizer, params: list[Any], generator: Generator, steps: int = 1) -> None:
    """Step with random gradients, the same numbers in every precision."""
    for _ in range(steps):
        for p in params:
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = torch.empty_like(p).copy_(grad)
        optimizer.step()


def quadratic(params: list[Any], optimizer: Optimizer, steps: int) -> None:
    """Step along the gradients of a quadratic function."""
    for _ in range(steps):
        for p in params:
            p.grad = 2 * p.detach() + 0.1
        optimizer.step()


def by_precision(double: float, single: float) -> float:
    """Return the tolerance for the precision that the test runs in."""
    return double if torch.get_default_dtype() is torch.float64 else single


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


def learned(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every m, the offsets of learned settings, and what the meta-optimizer holds for them."""
    return {
        f"{where} {i} {k}": x.clone()
        for where, pattern, dicts in (
            ("state", r"fop_(m|meta)\d+(_\d+)?", optimizer.state.values()),
            ("group", r"fop_(lr|momentum)(_\d+)?", optimizer.param_groups),
        )
        for i, entries in enumerate(dicts)
        for k, x in entries.items()
        if re.fullmatch(pattern, k)
    }


def resumed(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what a file holds of a state."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Descent(Optimizer):
    """A base from elsewhere: it makes its state when it finds none, and it may fail."""

    fails = False

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("the base has failed")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["velocity"] = torch.zeros_like(p)
                state["velocity"].mul_(0.5).add_(p.grad)
                p.sub_(state["velocity"], alpha=group["lr"])


class Prepared(Optimizer):
    """A base from elsewhere: it makes state for its parameters, and for itself, before any step.

    It trains the numbers above zero, by sums that do not start at zero, and counts steps in its state and out
    of it. Masks come back from a file as numbers, and it makes them masks again.
    """

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.state["time"] = 0  # pyright: ignore[reportArgumentType]
        self.age = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            self.state[p].update(mask=p.detach() > 0, sum=torch.ones_like(p))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"age": self.age}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.age = state_dict["age"]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mask"] = self.state[p]["mask"].bool()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], torch.where(self.state[p]["mask"], p.grad, 0)
                state["sum"] = state.get("sum", 0) + grad.square()
                p.sub_(group["lr"] / (1 + self.age + self.state["time"]) * grad / state["sum"].sqrt())  # pyright: ignore
        self.state["time"] += 1  # pyright: ignore
        self.age += 1


class Wrapping(Optimizer):
    """What is no base: its groups are those of another optimizer."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        self.wrapped = torch.optim.SGD(params, lr)
        self.defaults = self.wrapped.defaults

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.wrapped.param_groups


class Averaging(Descent):
    """A base that trains at one point, and is evaluated at another."""

    def train(self) -> None:
        self._move(-1.0)

    def eval(self) -> None:
        self._move(1.0)

    @torch.no_grad()
    def _move(self, by: float) -> None:
        for p, state in self.state.items():
            p.add_(state["velocity"], alpha=by)
