"""What estimators are checked on: a random run of a few steps, and one that ends at its minimum."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import softplus

from metafop import tree
from metafop.optimizers import SGD, Momentum
from metafop.preconditioners import Dense
from metafop.protocols import Batches, Optimizer, Preconditioner, Trains
from metafop.training import Training
from metafop.types import Batch, Buffers, Carry, Meta, OuterLoss, Params, Tree


class Problem(NamedTuple):
    """What an estimator is given: `estimator(training, outer_loss, meta, carry, batches)`."""

    training: Trains
    outer_loss: OuterLoss
    meta: Meta
    carry: Any
    batches: Batches


_BALL, _DENSE = Momentum(), Dense()


def several_steps(
    optimizer: Optimizer = _BALL,
    preconditioner: Preconditioner = _DENSE,
    steps: int = 5,
    seed: int = 0,
    **hyper: Any,
) -> Problem:
    """Return a random run that depends on all that a run may depend on, and sees another batch at each step.

    optimizer: of the run (`Momentum()`).
    preconditioner: of each of its two parameters (`Dense()`).
    steps: how many (5).
    seed: of what is drawn (0).
    hyper: the optimizer's hyperparameters by name (its defaults; for the default optimizer all are given).
    """
    if optimizer is _BALL:
        hyper = {"lr": 0.3, "momentum": 0.7, "weight_decay": 0.05} | hyper
    rng = Generator().manual_seed(seed)
    families = {"w": preconditioner, "b": preconditioner}
    return _problem(rng, optimizer, families, [_batch(rng) for _ in range(steps)], hyper)


def at_minimum(seed: int = 0) -> Problem:
    """Return a random run of gradient descent that ends at the minimum of its loss, to rounding.

    seed: of what is drawn (0).
    """
    rng = Generator().manual_seed(seed)
    # All eigenvalues of the Hessian are between 1 and 4: an error shrinks to .6 in each step.
    return _problem(rng, SGD(), {}, 80 * [_batch(rng)], {"lr": 0.4})


def _problem(
    rng: Generator,
    optimizer: Optimizer,
    families: Mapping[str, Preconditioner],
    batches: list[Batch],
    hyper: dict[str, Any],
) -> Problem:
    """Return a run of logistic regression: convex, with a weight for each example and a penalty.

    The loss counts its first three steps in a buffer, and changes with it. The outer loss reads meta too.
    """
    held_out = _batch(rng)

    def loss(params: Params, buffers: Buffers, batch: Batch, leaves: Tree) -> tuple[Tensor, Buffers]:
        errors, penalty = _errors(params, batch), sum(p.square().sum() for p in params.values())
        count = buffers["count"]
        value = (
            0.5 * (1 + 0.5 * count.to(errors).sin()) * (leaves["weights"] @ errors) + leaves["l2"] * penalty
        )
        return value, {"count": (count + 1).clamp(max=3)}

    def outer_loss(carry: Carry, meta: Meta) -> Tensor:
        return (
            _errors(carry.params, held_out).sum()
            + 0.1 * torch.stack([x.square().sum() for x in tree.leaves(meta)]).sum()
        )

    params = {"w": _noise(rng, 2, 3), "b": _noise(rng, 2)}
    training = Training(loss, optimizer, families)
    leaves = {"weights": _noise(rng, _EXAMPLES), "l2": 0.7}
    meta = training.init_meta(params, rng, loss=leaves, **hyper)
    learned = tree.map(lambda m: m + 0.3 * _noise(rng, *m.shape), meta.precond)
    carry = training.init(params, {"count": torch.tensor(0)})
    return Problem(training, outer_loss, meta._replace(precond=learned), carry, batches)


_EXAMPLES = 4


def _batch(rng: Generator) -> tuple[Tensor, Tensor]:
    return _noise(rng, _EXAMPLES, 3).tanh(), _noise(rng, _EXAMPLES, 2).sigmoid()


def _errors(params: Params, batch: Batch) -> Tensor:
    """Return the cross entropy of each example, of two outputs."""
    inputs, targets = batch
    logits = inputs @ params["w"].mT + params["b"]
    return (softplus(logits) - targets * logits).sum(1)


def _square(x: Tree) -> Tensor:
    return tree.norm(x).square()


def _noise(rng: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=rng)
