"""The optimizers that are differentiated: each as every library has it, at the same settings."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import Adam, Momentum

LR, MOMENTUM = 0.001, 0.9
BETAS, EPS = (0.9, 0.999), 1e-8
TINY = 1e-30  # in v̂, so that its root has a derivative where a gradient was always zero


class Rule(NamedTuple):
    """One optimizer: ours, whose defaults are the settings above, and the others'.

    A direction is what the parameters move against, times a learning rate.
    """

    ours: Momentum | Adam
    torch: Callable[..., torch.optim.Optimizer]  # from parameters, or groups of them
    torchopt: Callable[[], Any]  # a transformation of gradients into directions
    init: Callable[[Sequence[Tensor]], Any]  # by hand: from parameters to a state
    direct: Callable[[Sequence[Tensor], Any], tuple[list[Tensor], Any]]  # by hand: gradients and state


def _zeros(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) for p in params]


def _trace() -> Any:
    from torchopt.transform import trace  # only this experiment needs the peers

    return trace(momentum=MOMENTUM)


def _heavy_ball(grads: Sequence[Tensor], velocity: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    velocity = [torch.add(g, v, alpha=MOMENTUM) for g, v in zip(grads, velocity, strict=True)]
    return velocity, velocity


def _scale_by_adam() -> Any:
    from torchopt.transform import scale_by_adam

    return scale_by_adam(*BETAS, eps=EPS, eps_root=TINY)


AdamState = tuple[int, list[Tensor], list[Tensor]]  # steps, and the two moments


def _adam_state(params: Sequence[Tensor]) -> AdamState:
    return 0, _zeros(params), _zeros(params)


def _adam(grads: Sequence[Tensor], state: AdamState) -> tuple[list[Tensor], AdamState]:
    """m̂ / (√v̂ + eps)"""
    (beta1, beta2), (t, mean, square) = BETAS, state
    t += 1
    mean = [torch.lerp(m, g, 1 - beta1) for m, g in zip(mean, grads, strict=True)]
    square = [torch.addcmul(beta2 * v, g, g, value=1 - beta2) for v, g in zip(square, grads, strict=True)]
    roots = [torch.add(TINY, v, alpha=1 / (1 - beta2**t)).sqrt() for v in square]
    directions = [m / (1 - beta1**t) / (root + EPS) for m, root in zip(mean, roots, strict=True)]
    return directions, (t, mean, square)


HEAVY_BALL = Rule(Momentum(), partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM), _trace, _zeros, _heavy_ball)
ADAM = Rule(
    Adam(), partial(torch.optim.Adam, lr=LR, betas=BETAS, eps=EPS), _scale_by_adam, _adam_state, _adam
)
