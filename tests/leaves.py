"""Losses with leaves of several shapes, on the models of `problems`, and the same written out by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import by_hand
import torch
from problems import Problem, Setting, batch_loss, fits, moved
from torch import Generator, Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.functional import dropout as dropped

from metafop import Carry, Meta, Training, functional, randomness

EXAMPLES = 8  # of which each batch has six, some of them twice
Predict = Callable[[Tensor], Tensor]
Params = dict[str, Tensor]


def penalty(predict: Predict, params: Params, batch: Any, leaves: Any) -> Tensor:
    x, y, _ = batch
    return cross_entropy(predict(x), y) + leaves * sum(p.square().sum() for p in params.values())


def weights(predict: Predict, params: Params, batch: Any, leaves: Any) -> Tensor:
    x, y, index = batch
    return (leaves[index].sigmoid() * cross_entropy(predict(x), y, reduction="none")).mean()


def labels(predict: Predict, params: Params, batch: Any, leaves: Any) -> Tensor:
    x, _, index = batch
    return cross_entropy(predict(x), leaves["logits"][index].softmax(-1))


def inputs(predict: Predict, params: Params, batch: Any, leaves: Any) -> Tensor:
    x, y, index = batch
    return cross_entropy(predict(x + leaves["moved"][index]), y)


def nested(predict: Predict, params: Params, batch: Any, leaves: Any) -> Tensor:
    x, y, index = batch
    (scale, shift), penalties = leaves["input"], leaves["l2"]
    each = cross_entropy(predict(scale * x + shift), y, reduction="none")
    decay = sum(penalties[k] * p.square().sum() for k, p in params.items())
    return (leaves["weights"][index] * each).mean() + decay


class Form(NamedTuple):
    """Leaves of a shape, the loss that reads them and, of those with a schedule, what it reads at step t."""

    make: Callable[[Problem, Generator], Any]
    loss: Callable[[Predict, Params, Any, Any], Tensor]
    at: Callable[[Any, int], Any] = lambda leaves, t: leaves


def _random(*shape: int) -> Callable[[Problem, Generator], Tensor]:
    return lambda problem, rng: 0.3 * torch.randn(shape, generator=rng)


def _shape(problem: Problem) -> torch.Size:
    return problem.batches[0][0].shape[1:]


FORMS = {
    "a penalty": Form(lambda problem, rng: torch.tensor(0.02), penalty),
    "weights": Form(_random(EXAMPLES), weights),
    "labels": Form(lambda problem, rng: {"logits": _random(EXAMPLES, 2)(problem, rng)}, labels),
    "inputs": Form(lambda problem, rng: {"moved": _random(EXAMPLES, *_shape(problem))(problem, rng)}, inputs),
    "nested": Form(
        lambda problem, rng: {
            "l2": {k: torch.tensor(0.01 * (i + 1)) for i, k in enumerate(problem.params)},
            "input": (torch.tensor(1.1), _random(*_shape(problem))(problem, rng)),
            "weights": torch.rand(EXAMPLES, generator=rng),
        },
        nested,
    ),
}

# A penalty of its own for each of three steps; later ones have the last.
SCHEDULED = Form(
    lambda problem, rng: {"l2": torch.tensor([0.01, 0.03, 0.02]), "weights": torch.ones(EXAMPLES)},
    lambda predict, params, batch, leaves: (
        penalty(predict, params, batch, leaves["l2"]) + weights(predict, params, batch, leaves["weights"])
    ),
    lambda leaves, t: leaves | {"l2": leaves["l2"][min(t, 2)]},
)


@dataclass(frozen=True)
class Unroll:
    """A training with leaves, from its second step on, and what it and its outer loss are by hand.

    `problem` is the same model, with a loss without leaves.
    """

    training: Training
    outer_loss: Callable[..., Tensor]
    meta: Meta
    carry: Carry
    batches: list[Any]
    loss_by_hand: Callable[[Params, Any, Any, int], Tensor]
    outer_by_hand: Callable[..., Tensor]
    problem: Problem

    @property
    def given(self) -> tuple[Any, ...]:
        """What an estimator takes."""
        return self.training, self.outer_loss, self.meta, self.carry, self.batches

    def differentiated(self) -> by_hand.Derivatives:
        """Return what an estimator is to find."""
        with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has no second derivative
            return by_hand.differentiated(
                self.training, self.loss_by_hand, self.outer_by_hand, self.meta, self.carry, self.batches
            )


def unrolled(
    make: Callable[[Generator], Problem],
    form: Form,
    setting: Setting,
    generator: Generator,
    family: Any = None,
    dropout: float = 0.0,
) -> Unroll:
    """Return the second to the fifth step on a model: the optimizer's state is not that of a start."""
    problem = make(generator)
    numbered = [(*b, torch.randint(EXAMPLES, (6,), generator=generator)) for b in problem.batches]
    first, *batches = numbered

    def by_model(model: Any, batch: Any, leaves: Any) -> Tensor:
        return form.loss(_dropping(model, dropout), dict(model.named_parameters()), batch, leaves)

    loss, params, buffers = functional.from_module(problem.model, by_model, seeded=dropout > 0)
    fitting = {k: family for k, p in params.items() if family is not None and fits(family, p.shape)}
    training = Training(loss, setting.optimizer, fitting)
    leaves = form.make(problem, generator)
    meta = training.init_meta(params, generator, loss=leaves, **setting.hyper()._asdict())
    meta = meta._replace(precond=moved(meta.precond, generator))
    carry, _ = training.step(meta, training.init(params, buffers), first)

    def predict(params: Params) -> Predict:
        own = {k: b.clone() for k, b in problem.buffers.items()}  # batch norm writes into them
        return lambda x: functional_call(problem.model, params | own, (x,))

    def loss_by_hand(params: Params, batch: Any, leaves: Any, t: int) -> Tensor:
        leaves = form.at(leaves, 1 + t)
        if not dropout:
            return form.loss(predict(params), params, batch, leaves)
        seed = carry.buffers["seed"]
        for _ in range(t):
            seed = randomness.next_seed(seed)
        with randomness.seeded(seed):
            return form.loss(_dropping(predict(params), dropout), params, batch, leaves)

    return Unroll(
        training,
        lambda carry: problem.loss(carry.params, problem.buffers, problem.batches[0])[0],
        meta,
        carry,
        batches,
        loss_by_hand,
        lambda carry, meta: batch_loss(predict(carry.params), problem.batches[0]),
        problem,
    )


def _dropping(predict: Predict, rate: float) -> Predict:
    return lambda x: predict(dropped(x, rate)) if rate else predict(x)
