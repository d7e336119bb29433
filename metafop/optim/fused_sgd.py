"""Momentum's step and the sum of credited gradients, in place: torch's fused kernel, as with `fused=True`.

On a CPU torch steps each parameter by itself, which on small networks takes longer than the arithmetic. In
float32 FOP calls the kernel instead. In float64 the base steps itself, for its bits. The plain twins are
`torch.optim.SGD` and `Momentum.credit`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

_PLAIN = frozenset({Tensor, nn.Parameter})


def is_allowed(group: Mapping[str, Any]) -> bool:
    """Return whether the user leaves open how the step is computed, and all settings are plain numbers."""
    return (
        group["foreach"] is None
        and group["fused"] is None
        and not isinstance(group["lr"], Tensor)
        and not isinstance(group["momentum"], Tensor)
        and not isinstance(group["weight_decay"], Tensor)
    )


def suits(params: list[Tensor], grads: list[Tensor], velocities: Sequence[Tensor | None]) -> bool:
    """Return whether the kernel can be given these: it reads memory from where each begins, unchecked.

    Any of them may have been given new data since the last step. Before the first there is no velocity.
    """
    tensors: list[Any] = [*params, *grads, *velocities]
    sizes = list(map(Tensor.numel, params))
    return (
        _PLAIN.issuperset(map(type, tensors))
        and params[0].is_cpu
        and {x.layout for x in grads} == {torch.strided}
        and {x.dtype for x in tensors} == {torch.float32}
        and all(map(Tensor.is_contiguous, tensors))
        and [*sizes, *sizes, *sizes] == list(map(Tensor.numel, tensors))
    )


def step(
    settings: Mapping[str, Any], params: list[Tensor], directions: list[Tensor], velocities: list[Tensor]
) -> None:
    """Take the step of `torch.optim.SGD` with momentum and without dampening; all must suit."""
    torch._fused_sgd_(
        params,
        directions,
        velocities,
        lr=settings["lr"],
        momentum=settings["momentum"],
        weight_decay=settings["weight_decay"],
        nesterov=bool(settings["nesterov"]),
        maximize=bool(settings["maximize"]),
        dampening=0.0,
        is_first_step=False,
    )
    increment_version(params)  # as torch's other implementations do: autograd must see that they were changed


def add_to_credit(memory: Tensor, grad: Tensor, momentum: float) -> None:
    """u' = g + momentum u, in place: `Momentum.credit` without a new tensor as large as θ at each step."""
    torch.add(grad, memory, alpha=momentum, out=memory)
