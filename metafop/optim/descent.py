"""The step of `torch.optim.SGD` with momentum in one call: torch's fused kernel, as with `fused=True`.

On a CPU torch takes each parameter by itself, and with small networks that takes longer than the numbers do.
In single precision FOP uses the kernel instead; in double precision the bits are those of torch's own step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version


class Descent:
    """Parameters and their velocities, which suit the kernel: it looks at nothing but where they begin."""

    def __init__(self, params: list[Tensor], velocities: list[Tensor]) -> None:
        self.params, self.velocities = params, velocities
        self._sizes, self._places = [v.nbytes for v in velocities], [v.data_ptr() for v in velocities]

    def suits(self, grads: list[Tensor]) -> bool:
        """Return whether all lie in memory as the kernel takes it: any may have been given new data."""
        return (
            grads[0].is_cpu
            and {grad.layout for grad in grads} == {torch.strided}
            and [grad.nbytes for grad in grads] == self._sizes
            and [param.nbytes for param in self.params] == self._sizes
            and [v.data_ptr() for v in self.velocities] == self._places
            and all(map(Tensor.is_contiguous, grads))
            and all(map(Tensor.is_contiguous, self.params))
        )

    def step(self, group: Mapping[str, Any], steered: Mapping[str, Any], grads: list[Tensor]) -> None:
        """Take the step of a group without dampening; what is learned of its settings is in `steered`."""
        torch._fused_sgd_(
            self.params,
            grads,
            self.velocities,
            lr=steered.get("lr", group["lr"]),
            momentum=steered.get("momentum", group["momentum"]),
            weight_decay=group["weight_decay"],
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
            dampening=0.0,
            is_first_step=False,
        )
        increment_version(self.params)  # as torch's other ways do: autograd is to see what was written over


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


def made(params: list[Tensor], velocities: list[Tensor | None]) -> Descent | None:
    """Return the descent, if there is a velocity for each parameter: the first step is the base's own."""
    known = [v for v in velocities if v is not None and is_plain(v)]
    if len(known) < len(params):
        return None
    pairs = zip(known, params, strict=True)
    alike = all(v.dtype is p.dtype is torch.float32 and v.shape == p.shape for v, p in pairs)
    return Descent(params, known) if alike and all(map(Tensor.is_contiguous, known)) else None
