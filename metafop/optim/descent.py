"""The step of `torch.optim.SGD` with momentum in one call: torch's fused kernel, as with `fused=True`.

On a CPU torch takes each parameter by itself, and with small networks that takes longer than the numbers do.
In single precision FOP uses the kernel instead; in double precision the bits are those of torch's own step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def is_free(group: Mapping[str, Any]) -> bool:
    """Return whether it is left to torch how the step is computed, and all settings are plain numbers."""
    return (
        group["foreach"] is None
        and group["fused"] is None
        and not isinstance(group["lr"], Tensor)
        and not isinstance(group["momentum"], Tensor)
        and not isinstance(group["weight_decay"], Tensor)
    )


def is_plain(param: Tensor) -> bool:
    return type(param) in (Tensor, nn.Parameter) and param.device.type == "cpu"


def suits(x: Tensor) -> bool:
    """Return whether the kernel can take the tensor as it lies in memory."""
    return x.dtype is torch.float32 and x.layout is torch.strided and x.is_contiguous()


def descend(
    group: Mapping[str, Any],
    steered: Mapping[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    velocities: list[Tensor],
) -> None:
    """Take the step of a group, without dampening; what is learned of its settings is in `steered`."""
    torch._fused_sgd_(
        params,
        grads,
        velocities,
        lr=steered.get("lr", group["lr"]),
        momentum=steered.get("momentum", group["momentum"]),
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        dampening=0.0,
        is_first_step=False,
    )
