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


def is_free_to_choose(group: Mapping[str, Any]) -> bool:
    """Return whether the user leaves open how the step is computed, and all settings are plain numbers."""
    return (
        group["foreach"] is None
        and group["fused"] is None
        and not isinstance(group["lr"], Tensor)
        and not isinstance(group["momentum"], Tensor)
        and not isinstance(group["weight_decay"], Tensor)
    )


def suits(params: Sequence[Tensor], grads: Sequence[Tensor], velocities: Sequence[Tensor | None]) -> bool:
    """Return whether the kernel can be given these: it reads memory from where each begins, and checks nothing.

    Any of them may have been given new data since the last step. Before the first there is no velocity.
    """
    return (
        all(map(_is_plain, velocities))
        and all(
            p.shape == g.shape == v.shape  # pyright: ignore[reportOptionalMemberAccess]
            for p, g, v in zip(params, grads, velocities, strict=True)
        )
        and all(map(_is_plain, params))
        and all(map(_is_plain, grads))
    )


def _is_plain(x: Tensor | None) -> bool:
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.dtype is torch.float32  # pyright: ignore[reportOptionalMemberAccess]
        and x.is_cpu  # pyright: ignore[reportOptionalMemberAccess]
        and x.layout is torch.strided  # pyright: ignore[reportOptionalMemberAccess]
        and x.is_contiguous()  # pyright: ignore[reportOptionalMemberAccess]
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
    """u' = g + momentum u, in place: `Momentum.credit` without a new tensor of the parameter's size each step."""
    torch.add(grad, memory, alpha=momentum, out=memory)
