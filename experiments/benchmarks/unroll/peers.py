"""The same derivative by other means: by higher, by torchopt, by a loop; and training without any."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.benchmarks.unroll.cases import Batch, Unroll, batch_loss
from experiments.benchmarks.unroll.rules import LR

Grads = dict[str, Tensor]  # of the outer loss, in the learning rate of each parameter

unfused = sdpa_kernel(SDPBackend.MATH)  # torch's fused attention has no second derivative


@unfused
def by_loop(unroll: Unroll, batches: Sequence[Batch]) -> Grads:
    """Differentiate a loop of torch.autograd.grad, written by hand: θ' = θ - lr direction."""
    loss, lr, params = _differentiable(unroll)
    state = unroll.rule.init(params)
    for batch in batches:
        grads = torch.autograd.grad(loss(params, batch), params, create_graph=True)
        directions, state = unroll.rule.direct(grads, state)
        params = [
            torch.addcmul(p, rate, d, value=-1)
            for p, rate, d in zip(params, lr.values(), directions, strict=True)
        ]
    return _grads(loss(params, unroll.outer), lr)


@unfused
def by_higher(unroll: Unroll, batches: Sequence[Batch]) -> Grads:
    """A group of torch's optimizer for each parameter, so that each has a learning rate to override.

    Its Adam adds eps before it corrects v, as torch's once did: it computes slightly other numbers.
    """
    import higher  # only this experiment needs the peers

    lr = _rates(unroll.model)
    optimizer = unroll.rule.torch([{"params": [p]} for p in unroll.model.parameters()])
    override = {"lr": list(lr.values())}
    with higher.innerloop_ctx(unroll.model, optimizer, override=override) as (model, differentiable):
        for batch in batches:
            differentiable.step(batch_loss(model, batch))
        return _grads(batch_loss(model, unroll.outer), lr)


@unfused
def by_torchopt(unroll: Unroll, batches: Sequence[Batch]) -> Grads:
    """Its rule, then each parameter's own learning rate: less work than an optimizer for each parameter."""
    import torchopt

    loss, lr, params = _differentiable(unroll)
    negative = [-rate for rate in lr.values()]

    def scale(updates, state, *, params=None, inplace=True):
        return [rate * u for rate, u in zip(negative, updates, strict=True)], state

    by_rate = torchopt.base.GradientTransformation(lambda params: torchopt.base.EmptyState(), scale)
    optimizer = torchopt.chain(unroll.rule.torchopt(), by_rate)
    state = optimizer.init(params)
    for batch in batches:
        grads = torch.autograd.grad(loss(params, batch), params, create_graph=True)
        updates, state = optimizer.update(list(grads), state, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    return _grads(loss(params, unroll.outer), lr)


def training_alone(unroll: Unroll, batches: Sequence[Batch]) -> Grads:
    """Train with torch.optim, and differentiate nothing."""
    model = copy.deepcopy(unroll.model)
    optimizer = unroll.rule.torch(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        batch_loss(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        batch_loss(model, unroll.outer)
    return {}


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
