"""One training, unrolled: every method to differentiate through its steps."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from metafop import Carry, Estimate, Momentum, ReversibleMomentum, Training, functional
from metafop.hypergradients import Adjoint
from metafop.protocols import Estimator

Batch = tuple[Tensor, Tensor]
Grads = dict[str, Tensor]  # of the outer loss, in the learning rate of each parameter
Method = Callable[[Sequence[Batch]], Grads]  # one step for each batch

LR, MOMENTUM, CLASSES = 0.001, 0.9, 10
COMPILED = ("fast", "frugal", "log", "fast, forward")
PEERS = ("higher", "torchopt")
METHODS = (*COMPILED, "fast, eager", *PEERS, "loop", "training")


class Unroll(NamedTuple):
    """What every method starts from: a model, a batch for each step, and one for the outer loss."""

    model: nn.Sequential
    batches: list[Batch]
    outer: Batch


class Case(NamedTuple):
    """A network, what it is given, for how many steps, and in how many rounds this is measured."""

    model: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    batch: int
    horizon: int
    rounds: int

    def unroll(self, seed: int) -> Unroll:
        torch.manual_seed(seed)  # nn.Module draws its first weights from the global generator
        generator = Generator().manual_seed(seed)
        *batches, outer = draw_batches(self.horizon + 1, self.batch, self.shape, generator)
        return Unroll(self.model(), batches, outer)


def convnet(channels: int) -> nn.Sequential:
    """Return three 3×3 layers with batch norm, the mean over positions, and a linear layer."""
    layers: list[nn.Module] = []
    for (inputs, outputs), stride in zip(
        pairwise([3, channels, 2 * channels, 2 * channels]), [1, 2, 2], strict=True
    ):
        conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, CLASSES))


def draw_batches(count: int, size: int, shape: Sequence[int], generator: Generator) -> list[Batch]:
    """Return noise around the center of a class, and the class.

    Something to learn, slowly: otherwise terms cancel, and float32 leaves little of a derivative.
    """
    centers = torch.randn(CLASSES, *shape, generator=generator)
    labels = torch.randint(CLASSES, (count, size), generator=generator)
    return [(centers[y] + torch.randn(size, *shape, generator=generator), y) for y in labels]


def batch_loss(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def methods(unroll: Unroll, compiled: bool) -> dict[str, Method]:
    """Return ours, then the peers', the loop that these amount to, and training alone, the floor."""
    # One training for all of ours, so that they share what is compiled for it.
    estimate = estimates(unroll, Momentum())
    adjoints = {
        "fast": Adjoint(keep="all", compile=compiled),
        "frugal": Adjoint(keep="sqrt", compile=compiled),
        "log": Adjoint(keep="log", compile=compiled),
        "fast, forward": Adjoint(keep="all", compile=compiled, over="forward"),
        "fast, eager": Adjoint(keep="all"),
    }
    others = {"higher": by_higher, "torchopt": by_torchopt, "loop": by_loop, "training": training_alone}
    return {name: partial(_rate_grads, estimate, adjoint) for name, adjoint in adjoints.items()} | {
        name: partial(method, unroll) for name, method in others.items()
    }


def estimates(
    unroll: Unroll,
    optimizer: Momentum | ReversibleMomentum,
    of_training: Callable[..., Tensor] = batch_loss,
    leaves: Tensor | None = None,
) -> Callable[[Estimator, Sequence[Batch]], Estimate]:
    """Return a function from an estimator and batches to its estimate."""
    loss, params, buffers = functional.from_module(unroll.model, of_training)
    judged, _, _ = functional.from_module(unroll.model, batch_loss)
    training = Training(loss, optimizer)
    meta = training.init_meta(params, lr=dict.fromkeys(params, LR), momentum=MOMENTUM, loss=leaves)
    carry = training.init(params, buffers)

    def outer_loss(carry: Carry) -> Tensor:
        return judged(carry.params, carry.buffers, unroll.outer)[0]

    return lambda estimator, batches: estimator(training, outer_loss, meta, carry, batches)


def by_loop(unroll: Unroll, batches: Sequence[Batch]) -> Grads:
    """Differentiate a loop of torch.autograd.grad, written by hand: v' = momentum v + g, θ' = θ - lr v'."""
    loss, lr, params = _differentiable(unroll)
    velocity = [torch.zeros_like(p) for p in params]
    for batch in batches:
        grads = torch.autograd.grad(loss(params, batch), params, create_graph=True)
        velocity = [torch.add(g, v, alpha=MOMENTUM) for g, v in zip(grads, velocity, strict=True)]
        params = [
            torch.addcmul(p, rate, v, value=-1)
            for p, rate, v in zip(params, lr.values(), velocity, strict=True)
        ]
    return _grads(loss(params, unroll.outer), lr)


def by_higher(unroll: Unroll, batches: Sequence[Batch]) -> Grads:
    """A group of torch.optim.SGD for each parameter, so that each has a learning rate to override."""
    import higher  # only this experiment needs the peers

    lr = _rates(unroll.model)
    groups = [{"params": [p]} for p in unroll.model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)
    override = {"lr": list(lr.values())}
    with higher.innerloop_ctx(unroll.model, optimizer, override=override) as (model, differentiable):
        for batch in batches:
            differentiable.step(batch_loss(model, batch))
        return _grads(batch_loss(model, unroll.outer), lr)


def by_torchopt(unroll: Unroll, batches: Sequence[Batch]) -> Grads:
    """Its momentum, then each parameter's own learning rate: less work than an `sgd` for each parameter."""
    import torchopt
    from torchopt.transform import trace

    loss, lr, params = _differentiable(unroll)
    negative = [-rate for rate in lr.values()]

    def scale(updates, state, *, params=None, inplace=True):
        return [rate * u for rate, u in zip(negative, updates, strict=True)], state

    by_rate = torchopt.base.GradientTransformation(lambda params: torchopt.base.EmptyState(), scale)
    optimizer = torchopt.chain(trace(momentum=MOMENTUM), by_rate)
    state = optimizer.init(params)
    for batch in batches:
        grads = torch.autograd.grad(loss(params, batch), params, create_graph=True)
        updates, state = optimizer.update(list(grads), state, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return _grads(loss(params, unroll.outer), lr)


def training_alone(unroll: Unroll, batches: Sequence[Batch]) -> Grads:
    """Train with torch.optim, and differentiate nothing."""
    model = copy.deepcopy(unroll.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for batch in batches:
        optimizer.zero_grad()
        batch_loss(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        batch_loss(model, unroll.outer)
    return {}


def _rate_grads(
    estimate: Callable[[Estimator, Sequence[Batch]], Estimate], estimator: Estimator, batches: Sequence[Batch]
) -> Grads:
    return estimate(estimator, batches).grads.hyper.lr


def _rates(model: nn.Module) -> Grads:
    return {name: torch.tensor(LR, requires_grad=True) for name, _ in model.named_parameters()}


def _differentiable(
    unroll: Unroll,
) -> tuple[Callable[[list[Tensor], Batch], Tensor], Grads, list[Tensor]]:
    """Return the loss as a function of the parameters, their learning rates, and the first of them."""
    model, lr = unroll.model, _rates(unroll.model)
    buffers = {name: b.clone() for name, b in model.named_buffers()}  # written into

    def loss(params: list[Tensor], batch: Batch) -> Tensor:
        state = dict(zip(lr, params, strict=True)) | buffers
        return batch_loss(lambda inputs: functional_call(model, state, inputs), batch)

    return loss, lr, [p.detach().requires_grad_() for p in model.parameters()]


def _grads(value: Tensor, lr: Grads) -> Grads:
    return dict(zip(lr, torch.autograd.grad(value, list(lr.values())), strict=True))
