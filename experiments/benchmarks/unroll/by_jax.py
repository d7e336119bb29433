"""The same derivative by JAX: `jit(grad(…))` of a `lax.scan` over the steps, as it is and checkpointed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import torch
from jax import Array, lax
from jax import numpy as jnp
from torch import nn

from experiments.benchmarks.unroll.cases import Batch, Unroll
from experiments.benchmarks.unroll.jax_networks import Params, array, network, params_of
from experiments.benchmarks.unroll.peers import Grads
from experiments.benchmarks.unroll.rules import BETAS, EPS, LR, MOMENTUM, TINY
from metafop import Adam, Momentum

jax.config.update("jax_platforms", "cpu")  # as torch's tensors are

Tree = Any
Batches = tuple[Array, Array]  # inputs and labels, of one batch or of several


def jax_methods(unroll: Unroll) -> dict[str, Callable[[], Grads]]:
    """Return both ways to differentiate through all steps.

    The batches are stacked here, once, for this is how a scan takes them.
    """
    lr = {name: jnp.float32(LR) for name, _ in unroll.model.named_parameters()}
    outer = [x[0] for x in _stacked([unroll.outer])]
    given = (lr, params_of(unroll.model), _stacked(unroll.batches), outer)
    # Within a loop XLA has only a slow convolution on a CPU: its derivatives take ten times as long.
    written_out = any(isinstance(layer, nn.Conv2d) for layer in unroll.model.modules())
    checkpoint = partial(jax.checkpoint, prevent_cse=written_out)  # in a loop JAX advises False, for speed
    return {
        "jax": partial(_grads, _derivative(unroll, lambda step: step, written_out), *given),
        "jax, checkpointed": partial(_grads, _derivative(unroll, checkpoint, written_out), *given),
    }


def _derivative(
    unroll: Unroll, wrap: Callable[[Callable], Callable], written_out: bool
) -> Callable[..., Params]:
    loss, (init, direct) = partial(_loss, unroll.model), RULES[type(unroll.rule.ours)]

    def outer_loss(lr: Params, params: Params, batches: Batches, outer: Batches) -> Array:
        def step(carry: Tree, batch: Batches) -> tuple[Tree, None]:
            params, state = carry
            directions, state = direct(jax.grad(loss)(params, batch), state)
            return (jax.tree.map(lambda p, rate, d: p - rate * d, params, lr, directions), state), None

        (params, _), _ = lax.scan(wrap(step), (params, init(params)), batches, unroll=written_out)
        return loss(params, outer)

    return jax.jit(jax.grad(outer_loss))


def _grads(derivative: Callable[..., Params], *given: Tree) -> Grads:
    grads = jax.device_get(derivative(*given))  # waits until they are computed
    return {name: torch.tensor(grad) for name, grad in grads.items()}


def _loss(model: nn.Module, params: Params, batch: Batches) -> Array:
    """The mean cross entropy."""
    inputs, labels = batch
    logs = jax.nn.log_softmax(network(model, params, inputs))
    return -jnp.take_along_axis(logs, labels[:, None], axis=1).mean()


def _zeros(params: Params) -> Tree:
    return jax.tree.map(jnp.zeros_like, params)


def _heavy_ball(grads: Tree, velocity: Tree) -> tuple[Tree, Tree]:
    velocity = jax.tree.map(lambda g, v: g + MOMENTUM * v, grads, velocity)
    return velocity, velocity


def _adam_state(params: Params) -> Tree:
    return 0.0, _zeros(params), _zeros(params)


def _adam(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
    (beta1, beta2), (t, mean, square) = BETAS, state
    t += 1
    mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, mean, grads)
    square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, square, grads)
    c1, c2 = 1 - beta1**t, 1 - beta2**t
    directions = jax.tree.map(lambda m, v: m / c1 / (jnp.sqrt(v / c2 + TINY) + EPS), mean, square)
    return directions, (t, mean, square)


# By hand: the first state, of parameters; and directions and the next state, of gradients and a state.
RULES: dict[type, tuple[Callable, Callable]] = {Momentum: (_zeros, _heavy_ball), Adam: (_adam_state, _adam)}


def _stacked(batches: Sequence[Batch]) -> Batches:
    inputs, labels = (array(torch.stack(parts)) for parts in zip(*batches, strict=True))
    return (jnp.moveaxis(inputs, 2, -1) if inputs.ndim == 5 else inputs), labels  # images: channels last
