"""Training written out: a loop over torch.autograd.grad(create_graph=True), optimizers from the papers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import SGD, Adam, Carry, Meta, Scheduled, Training, tree

Params = dict[str, Tensor]


class Derivatives(NamedTuple):
    """The outer loss, its derivatives in meta and in the first carry, and the parameters after all steps."""

    value: Tensor
    grads: Meta
    start: Carry
    params: Params


def differentiated(
    training: Training,
    loss: Callable[[Params, Any, Any, int], Tensor],
    outer_loss: Callable[..., Tensor],
    meta: Meta,
    carry: Carry,
    batches: Sequence[Any],
) -> Derivatives:
    """Return what an estimator is to find.

    loss: `loss(params, batch, leaves, t)`, that of step t.
    outer_loss: `outer_loss(carry, meta)`, of a carry that has the last parameters alone.
    """
    floats, rebuild = tree.partition((meta, carry))
    floats = [x.detach().clone().requires_grad_() for x in floats]
    here, start = rebuild(floats)
    params, (time, states) = dict(start.params), state(training.optimizer, start)
    for t, batch in enumerate(batches):
        value = loss(params, batch, here.loss, t)
        grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
        for (k, p), g in zip(list(params.items()), grads, strict=True):
            family = training.preconditioners.get(k)
            d = matrix_times(family, here.precond[k], g) if family else g
            hyper = hyper_at(training.optimizer, here.hyper, k, int(time) + t)
            params[k], states[k] = step(training.optimizer, hyper, time + t, p, states[k], d)
    value = outer_loss(Carry(params, (), carry.buffers), here)
    d_meta, d_start = tree.partition(tree.zeros_like((meta, carry)))[1](
        list(torch.autograd.grad(value, floats, materialize_grads=True))
    )
    return Derivatives(value.detach(), d_meta, d_start, tree.map(torch.detach, params))


def state(optimizer: Any, carry: Carry) -> tuple[Any, dict[str, tuple[Tensor, Tensor]]]:
    """Return how many steps were taken, and the two states of each parameter that `step` takes."""
    zeros, opt, time = tree.zeros_like(carry.params), carry.opt, 0
    if isinstance(optimizer, Scheduled):
        optimizer, time, opt = optimizer.optimizer, opt.time, opt.inner
    if isinstance(optimizer, SGD):
        return time, {k: (zeros[k], zeros[k]) for k in carry.params}
    if isinstance(optimizer, Adam):
        return opt.time, {k: (opt.mean[k], opt.square[k]) for k in carry.params}
    velocity = opt if isinstance(opt, dict) else opt.velocity
    return time, {k: (velocity[k], zeros[k]) for k in carry.params}


def hyper_at(optimizer: Any, hyper: Any, name: str, t: int) -> dict[str, Any]:
    """Return the hyperparameters of a parameter at step t: its own of a dict, the entry of a schedule."""
    own = {k: x[name] if isinstance(x, dict) else x for k, x in hyper._asdict().items()}
    return tree.map(lambda x: x[min(t, len(x) - 1)] if x.dim() else x, own)


def step(
    optimizer: Any, hyper: dict[str, Any], t: Any, p: Tensor, state: tuple[Tensor, Tensor], d: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return a parameter and its two states after step t, from 0, as the papers have it."""
    optimizer = optimizer.optimizer if isinstance(optimizer, Scheduled) else optimizer
    lr, weight_decay, (first, second) = hyper["lr"], hyper["weight_decay"], state
    if isinstance(optimizer, Adam):
        beta1, beta2 = hyper["betas"]
        first, second = beta1 * first + (1 - beta1) * d, beta2 * second + (1 - beta2) * d * d
        root = (second / (1 - beta2 ** (t + 1))).sqrt() + hyper["eps"]
        return p - lr * (weight_decay * p + first / (1 - beta1 ** (t + 1)) / root), (first, second)
    d = d + weight_decay * p
    if isinstance(optimizer, SGD):
        return p - lr * d, state
    first = hyper["momentum"] * first + d
    nesterov = getattr(optimizer, "nesterov", False)
    return p - lr * (d + hyper["momentum"] * first if nesterov else first), (first, second)


def matrix_times(family: Any, m: Any, grad: Tensor) -> Tensor:
    """Return P g from all numbers of the matrix P."""
    p = family.matrix(m)
    return (grad.reshape(-1, p.shape[-1]) @ p).reshape(grad.shape)
