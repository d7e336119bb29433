"""Random programs for property tests: a few readable choices, from which all that an estimator takes is made.

Every choice is a small integer to hypothesis: which ones it draws does not depend on what else is imported.
"""

import os
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from hypothesis import configuration, settings
from hypothesis import strategies as st
from problems import FAMILIES, fits, moved
from torch import Generator, Tensor

from metafop import SGD, Adam, Carry, Meta, Momentum, Scheduled, Training, tree
from metafop.hypergradients import Adjoint
from metafop.types import OuterLoss

# Hypothesis keeps files even where it has no database, and does without if it cannot write them.
configuration.set_hypothesis_home_dir(os.devnull)


def over(programs: int) -> settings:
    """Return the settings of a test over so many programs: always the same ones, and nothing on disk."""
    return settings(max_examples=programs, derandomize=True, deadline=None, database=None)


class Window(NamedTuple):
    """What an estimator takes."""

    training: Training
    outer_loss: OuterLoss
    meta: Meta
    carry: Carry
    batches: list[Tensor]


# How the loss goes on from s, a number for each example, with a parameter's rows and the inputs x.
MIXES = {
    "tanh": lambda s, rows, x: torch.tanh(s + x @ rows.sum(0)),
    "product": lambda s, rows, x: s * (1 + x @ rows.mean(0)),
    "matmul": lambda s, rows, x: s + torch.tanh(x @ rows.mT).prod(1),
    "logsumexp": lambda s, rows, x: torch.logsumexp(s[:, None] + x @ rows.mT, 1),
}
SHAPES = [(), (1,), (3,), (2, 3), (3, 1), (1, 2), (2, 1, 2), (2, 2, 1, 2)]
EXAMPLES, INPUTS = 3, 4
OPTIMIZERS = [SGD(), Momentum(), Momentum(nesterov=True), Adam()]
# Inside the domains of the hyperparameters, and on their boundaries.
VALUES = {
    "lr": [0.1, 0.01, 0.3, 0.0],
    "weight_decay": [0.0, 0.02, 0.5],
    "momentum": [0.9, 0.5, 0.0, 0.99],
    "betas": list(product([0.9, 0.3, 0.0], [0.99, 0.5, 0.0, 0.999])),
    "eps": [1e-2, 1e-8, 1e-1],
}


@dataclass(frozen=True)
class Param:
    shape: tuple[int, ...]
    mix: str
    family: str


@dataclass(frozen=True)
class Program:
    """A training of `steps` steps, and how they are cut into windows; tensors are drawn from the `seed`.

    `entries` is the length of a schedule of learning rates, 0 for none. `has_leaves` says whether the loss is
    given weights of examples and a penalty. `keep` is that of `Adjoint`, or how many carries more than the
    least are in its memory.
    """

    params: tuple[Param, ...]
    optimizer: Any
    hyper: dict[str, Any]
    entries: int
    has_buffers: bool
    has_leaves: bool
    steps: int
    cut: int
    keep: str | int
    seed: int

    def window(self) -> Window:
        generator = Generator().manual_seed(self.seed)
        params = {
            f"p{i}": 0.5 * torch.randn(param.shape, generator=generator)
            for i, param in enumerate(self.params)
        }
        families = {f"p{i}": FAMILIES[param.family] for i, param in enumerate(self.params)}
        buffers = {"mean": torch.zeros(())} if self.has_buffers else {}
        *batches, last = torch.randn(self.steps + 1, EXAMPLES, INPUTS + 2, generator=generator)
        optimizer, hyper = self._scheduled(generator)
        loss: Any = self.loss
        leaves = None
        if self.has_leaves:
            loss = lambda params, buffers, batch, leaves: self.loss(params, buffers, batch, leaves)  # noqa: E731
            leaves = {"weights": 0.5 + torch.rand(EXAMPLES, generator=generator), "l2": torch.tensor(0.02)}
        training = Training(loss, optimizer, families)
        meta = training.init_meta(params, generator, loss=leaves, **hyper._asdict())
        carry = training.init(params, buffers)

        def outer_loss(carry: Any) -> Tensor:
            return self.loss(carry.params, carry.buffers, last)[0]

        meta = meta._replace(precond=moved(meta.precond, generator))
        return Window(training, outer_loss, meta, carry, batches)

    def loss(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], batch: Tensor, leaves: Any = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean of 2 log cosh of an error, and a running mean that no gradient depends on.

        With leaves it is weighted, and penalized.
        """
        s, target, inputs = batch[:, 0], batch[:, 1], batch[:, 2:]
        for param, p in zip(self.params, params.values(), strict=True):
            rows = p.flatten(1) if p.dim() > 1 else p.reshape(1, -1)
            s = MIXES[param.mix](s, rows, inputs[:, : rows.shape[1]])
        error = s - target
        each = torch.logsumexp(torch.stack([error, -error]), 0)
        value = each.mean()
        if leaves is not None:
            squares = sum(p.square().sum() for p in params.values())
            value = (leaves["weights"] * each).mean() + leaves["l2"] * squares
        return value, {name: 0.9 * b + 0.1 * s.mean() for name, b in buffers.items()}

    def adjoint(self, carry: Carry, **settings: Any) -> Adjoint:
        if isinstance(self.keep, str):
            return Adjoint(keep=self.keep, **settings)  # pyright: ignore[reportArgumentType]
        carries = min(self.steps.bit_length() + self.keep, self.steps)
        return Adjoint(memory=carries * tree.size(carry), **settings)

    def _scheduled(self, generator: Generator) -> tuple[Any, Any]:
        """Return the optimizer and its hyperparameters, with a schedule around what is drawn."""
        hyper = self.optimizer.hyper(**self.hyper)
        if not self.entries:
            return self.optimizer, hyper
        scheduled = Scheduled(self.optimizer, self.entries)
        lr = tree.map(lambda x: x * (0.5 + torch.rand(self.entries, generator=generator)), hyper.lr)
        return scheduled, scheduled.hyper(**(self.hyper | {"lr": lr}))


PAIRS = [(shape, name) for shape in SHAPES for name, family in FAMILIES.items() if fits(family, shape)]


@st.composite
def _params(draw: Any) -> Param:
    shape, family = draw(st.sampled_from(PAIRS))
    return Param(shape, draw(st.sampled_from(list(MIXES))), family)


@st.composite
def programs(draw: Any, least: int = 1, most: int = 9) -> Program:
    """Draw a program of `least` to `most` steps."""
    params = tuple(draw(st.lists(_params(), min_size=1, max_size=4)))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    hyper = {name: draw(st.sampled_from(VALUES[name])) for name in optimizer.domains}
    if draw(st.booleans()):
        hyper["lr"] = {f"p{i}": draw(st.sampled_from(VALUES["lr"])) for i in range(len(params))}
    steps = draw(st.integers(least, most))
    return Program(
        params,
        optimizer,
        hyper,
        entries=draw(st.sampled_from([0, 0, 1, 3, 9])),
        has_buffers=draw(st.booleans()),
        has_leaves=draw(st.booleans()),
        steps=steps,
        cut=draw(st.integers(1, max(steps - 1, 1))),
        keep=draw(st.sampled_from(["all", "sqrt", "log", 0, 1, 3])),
        seed=draw(st.integers(0, 99)),
    )
