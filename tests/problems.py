"""What tests run over: optimizers with their twins in torch, families with shapes that fit, small models."""

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from metafop import (
    SGD,
    Adam,
    Bounded,
    Dense,
    Diagonal,
    Identity,
    Kronecker,
    Last,
    LowRank,
    Meta,
    Momentum,
    Normalized,
    Rescaled,
    Scalar,
    Seen,
    Spatial,
    Training,
    functional,
    tree,
)

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True)
class Setting:
    """An optimizer, values for its hyperparameters, and torch's optimizer with the same."""

    optimizer: Any
    values: dict[str, Any]
    twin: Callable[..., torch.optim.Optimizer]

    def hyper(self, **changed: Any) -> Any:
        return self.optimizer.hyper(**(self.values | changed))


OPTIMIZERS = {
    "sgd": Setting(SGD(), {"lr": 0.1}, partial(torch.optim.SGD, lr=0.1)),
    "sgd, decayed": Setting(
        SGD(), {"lr": 0.05, "weight_decay": 0.02}, partial(torch.optim.SGD, lr=0.05, weight_decay=0.02)
    ),
    "heavy ball": Setting(
        Momentum(), {"lr": 0.05, "momentum": 0.9}, partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    ),
    "heavy ball, decayed": Setting(
        Momentum(),
        {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.02},
        partial(torch.optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.02),
    ),
    "nesterov": Setting(
        Momentum(nesterov=True),
        {"lr": 0.05, "momentum": 0.9},
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "nesterov, decayed": Setting(
        Momentum(nesterov=True),
        {"lr": 0.1, "momentum": 0.6, "weight_decay": 0.02},
        partial(torch.optim.SGD, lr=0.1, momentum=0.6, nesterov=True, weight_decay=0.02),
    ),
    "adam": Setting(Adam(), {"lr": 0.01}, partial(torch.optim.Adam, lr=0.01)),
    "adam, short": Setting(
        Adam(),
        {"lr": 0.02, "betas": (0.5, 0.8), "eps": 1e-3},
        partial(torch.optim.Adam, lr=0.02, betas=(0.5, 0.8), eps=1e-3),
    ),
    "adam, decayed": Setting(
        Adam(),
        {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1},
        partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    ),
}

FAMILIES = {
    "identity": Identity(),
    "scalar": Scalar(),
    "diagonal": Diagonal(),
    "dense": Dense(),
    "spatial": Spatial(),
    "low rank": LowRank(rank=2),
    "kronecker": Kronecker(),
    "normalized identity": Normalized(Identity()),
    "normalized dense": Normalized(Dense()),
    "normalized low rank": Normalized(LowRank(rank=2)),
    "bounded diagonal": Bounded(Diagonal(), limit=0.5),
    "bounded kronecker": Bounded(Kronecker(), limit=0.5),
    "rescaled scalar": Rescaled(Scalar(), limit=0.5),
    "rescaled spatial": Rescaled(Spatial(), limit=0.5),
}

SHAPES = [(), (5,), (3, 4), (1, 6), (2, 3, 4), (4, 2, 3, 3), (3, 2, 1, 1), (2, 1, 2, 2, 2)]


def fits(family: Any, shape: tuple[int, ...]) -> bool:
    if isinstance(family, Normalized | Bounded | Rescaled):
        return fits(family.family, shape)
    if isinstance(family, LowRank):
        return math.prod(shape[1:] or shape) >= family.rank
    return len(shape) >= {Kronecker: 2, Spatial: 3}.get(type(family), 0)


FITTING = {
    f"{name}, {shape}": (family, shape)
    for name, family in FAMILIES.items()
    for shape in SHAPES
    if fits(family, shape)
}


def every(names: str, table: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Run a test over a table."""
    return pytest.mark.parametrize(names, list(table.values()), ids=list(table))


def moved(x: Any, generator: Generator, size: float = 0.3) -> Any:
    """Return a tree near `x`: a preconditioner that has learned something."""
    return tree.map(
        lambda leaf: leaf + size * torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator), x
    )


@dataclass(frozen=True)
class Problem:
    """A model, its pure loss, where to start, and batches to train on."""

    model: nn.Module
    loss: Any
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    batches: list[tuple[Tensor, Tensor]]

    def training(self, optimizer: Any, family: Any = None) -> Training:
        """Return a training with `family` for every parameter that it fits."""
        fitting = {k: family for k, p in self.params.items() if family is not None and fits(family, p.shape)}
        return Training(self.loss, optimizer, fitting)


def batch_loss(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def filled(model: ModelT, generator: Generator) -> ModelT:
    """Return the model with parameters from the generator."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=generator))
    return model


def _problem(model: nn.Module, shape: tuple[int, ...], generator: Generator) -> Problem:
    model = filled(model, generator)
    batches = [
        (torch.randn(6, *shape, generator=generator), torch.randint(2, (6,), generator=generator))
        for _ in range(5)
    ]
    return Problem(model, *functional.from_module(model, batch_loss), batches)


def mlp(generator: Generator) -> Problem:
    return _problem(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (3,), generator)


def convnet(generator: Generator, bias: bool = False) -> Problem:
    convolution = nn.Conv2d(2, 3, 3, bias=bias)
    model = nn.Sequential(convolution, nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    return _problem(model, (2, 4, 4), generator)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.GRU | nn.LSTM) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Attention(nn.Module):
    """Two heads of attention over positions, a residual connection, layer norm, and the mean of positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.norm, self.head = nn.Linear(width, 3 * width), nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)  # q k v first, then batch, head
        mixed = scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.head(self.norm(x + mixed).mean(1))


def gru(generator: Generator) -> Problem:
    return _problem(Recurrent(nn.GRU(2, 3, batch_first=True)), (4, 2), generator)


def lstm(generator: Generator) -> Problem:
    return _problem(Recurrent(nn.LSTM(2, 3, batch_first=True)), (4, 2), generator)


def attention(generator: Generator) -> Problem:
    return _problem(Attention(4), (3, 4), generator)


MODELS = {"mlp": mlp, "convnet": convnet}
ALL_MODELS = MODELS | {"gru": gru, "attention": attention}
# A bias before batch norm changes nothing, and its gradient is nothing but rounding.
HARD_MODELS = MODELS | {"convnet, idle bias": partial(convnet, bias=True)}


def taken(training: Any, meta: Meta, carry: Any, batches: list) -> tuple[Last, Seen]:
    """Return the last of `len(batches) - 1` steps, and what is seen after it on the last batch."""
    for batch in batches[:-2]:
        carry, _ = training.step(meta, carry, batch)
    seen = training.evaluate(meta, carry, batches[-2])
    after, _ = training.advance(meta, carry, seen)
    return Last(carry, seen, ()), training.evaluate(meta, after, batches[-1])


def assert_near(actual: Any, expected: Any, rtol: float, size: float | Tensor = 0.0) -> None:
    """Compare two trees leaf by leaf, in units of the leaf's largest number, or of `size` if that is larger.

    Where terms cancel, `size` is theirs.
    """
    actual, expected = tree.named(actual), tree.named(expected)
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        largest = max([float(size), *e.detach().abs().flatten().tolist()])
        torch.testing.assert_close(
            actual[name], e, rtol=0, atol=rtol * largest, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_bits(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def refusal(function, *arguments):
    """What a command says, in one line, when it refuses to go on."""
    with pytest.raises(SystemExit) as exit:
        function(*arguments)
    assert isinstance(exit.value.code, str)
    assert "\n" not in exit.value.code
    return exit.value.code


def assert_clear(act: Callable[[], Any], words: list[str], errors: Any = (ValueError, TypeError)) -> None:
    """Check that what is refused gets one sentence with these words, of a length that is read."""
    with pytest.raises(errors) as caught:
        act()
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert re.search(r"[.!)\]]$", message)
    assert "\n" not in message or "dropout" in message.lower()
    assert len(message) < 400


def assert_pure(function, *args):
    before = copy.deepcopy(args)
    first, second = function(*args), function(*args)
    assert_same_bits(first, second)
    assert_same_bits(args, before)


def slope(window, h=1e-5):
    """The derivative in lr, by central differences of whole runs."""
    training, outer_loss, meta, carry, batches = window

    def run(lr):
        now = carry
        for batch in batches:
            now, _ = training.step(meta._replace(hyper=meta.hyper._replace(lr=lr)), now, batch)
        return outer_loss(now)

    return (run(meta.hyper.lr + h) - run(meta.hyper.lr - h)) / (2 * h)
