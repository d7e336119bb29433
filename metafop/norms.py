"""Batch, layer and instance norm in other operations: torch differentiates these three wrongly at times.

Its formula for their gradient takes mean and variance for constants where it is differentiated twice more, as
a third derivative of the loss is, or once through vmap. (docs/math.md, 27)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """(x - mean) / √(variance + eps) weight + bias, of each channel over the batch."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None:  # torch's own writes into these
        F.batch_norm(input.detach(), running_mean, running_var, None, None, True, momentum, eps)
    return _normalized(input, [0, *range(2, input.dim())], _by_channel(input, weight, bias), eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """(x - mean) / √(variance + eps) weight + bias, of each channel of each example."""
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None:
        F.instance_norm(input.detach(), running_mean, running_var, None, None, True, momentum, eps)
    return _normalized(input, range(2, input.dim()), _by_channel(input, weight, bias), eps)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """(x - mean) / √(variance + eps) weight + bias, over the last dimensions."""
    return _normalized(input, range(-len(normalized_shape), 0), (weight, bias), eps)


class NormsWrittenOut(TorchFunctionMode):
    """A context in which these are computed as above."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _WRITTEN_OUT.get(func, func)(*args, **(kwargs or {}))


_WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.layer_norm: layer_norm,
    torch.batch_norm: lambda x, weight, bias, mean, variance, training, momentum, eps, _: batch_norm(
        x, mean, variance, weight, bias, training, momentum, eps
    ),
    torch.instance_norm: lambda x, weight, bias, mean, variance, own, momentum, eps, _: instance_norm(
        x, mean, variance, weight, bias, own, momentum, eps
    ),
    torch.layer_norm: lambda x, shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True: layer_norm(
        x, shape, weight, bias, eps
    ),
}


def _normalized(
    x: Tensor, dims: Sequence[int], affine: tuple[Tensor | None, Tensor | None], eps: float
) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(list(dims), keepdim=True)
    normal = centred / (centred.square().mean(list(dims), keepdim=True) + eps).sqrt()
    weight, bias = affine
    normal = normal if weight is None else normal * weight
    return (normal if bias is None else normal + bias).to(x.dtype)


def _by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    shape = (-1, *[1] * (x.dim() - 2))
    return weight if weight is None else weight.reshape(shape), bias if bias is None else bias.reshape(shape)
