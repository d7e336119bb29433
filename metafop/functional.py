"""Pure losses: from a plain function of the parameters, or from an `nn.Module`, its buffers explicit."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from metafop import tree
from metafop.types import Batch, Buffers, Loss, Params

_DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def plain(loss: Callable[[Params, Batch], Tensor]) -> Loss:
    """Return `loss(params, batch)` as a loss that takes buffers and hands them on as they are.

    >>> square = plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> square({"w": torch.tensor(3.0)}, {}, torch.tensor(1.0))
    (tensor(4.), {})
    """

    def lifted(params: Params, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        return loss(params, batch), buffers

    return lifted


def from_module(
    model: nn.Module, loss: Callable[[Callable[..., Any], Batch], Tensor]
) -> tuple[Loss, Params, Buffers]:
    """Return a pure loss, and copies of the model's trainable parameters and floating-point buffers.

    `loss(model, batch)` is written as always, but can only call the model: what it is given is a function
    that computes with the parameters and buffers of the call. The module itself is copied and never changed;
    parameters that do not require a gradient, and integer buffers, stay as they are. For a loss in eval mode,
    call this once more with `model.eval()`.

    >>> model = torch.nn.Linear(2, 1)
    >>> loss, params, buffers = from_module(model, lambda model, batch: model(batch).square().mean())
    >>> sorted(params)
    ['bias', 'weight']
    >>> value, buffers = loss(params, buffers, torch.ones(3, 2))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"from_module takes an nn.Module first, got {type(model).__name__}. Pass the model.")
    model = copy.deepcopy(model)  # what becomes of the caller's, its mode for one, is no business of the loss
    _refuse_impurity(model)
    params = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
    buffers = {k: b.detach() for k, b in model.named_buffers() if b.is_floating_point()}
    kept = {k: b for k, b in model.named_buffers() if not b.is_floating_point()}
    names, buffer_names = params.keys(), buffers.keys()

    def pure(params: Params, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        if params.keys() != names:
            raise ValueError(
                f"The parameters are {sorted(params)}, but the module has {sorted(names)}. "
                "The tree of parameters must not change."
            )
        if buffers.keys() != buffer_names:
            raise ValueError(
                f"The buffers are {sorted(buffers)}, but the module has {sorted(buffer_names)}. "
                "Start with those that from_module returns: training.init(params, buffers)."
            )
        # Modules write into buffers. What they write into is made here and, under vmap, must have the
        # batch dimensions of everything that may be written.
        inputs = [leaf for leaf in tree.leaves((params, batch)) if isinstance(leaf, Tensor)]
        zero = torch.stack([leaf.new_zeros((), dtype=torch.float32) for leaf in inputs]).sum()
        written = {k: b + zero.to(b.dtype) for k, b in buffers.items()}
        state = params | written | {k: b.clone() for k, b in kept.items()}

        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(model, state, args, kwargs)

        value = loss(call, batch)
        return value, {k: state[k] for k in buffers}

    return pure, params, buffers


def _refuse_impurity(model: nn.Module) -> None:
    for name, module in model.named_modules():
        draws = isinstance(module, _DRAWS) and getattr(module, "p", 1.0) > 0
        inside = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
        if module.training and (draws or inside):
            raise ValueError(
                f"The module {name or 'itself'} ({module}) draws random numbers in training mode, "
                "so that the loss is no function of its arguments. "
                "Put it in eval mode, or pass the noise with the batch."
            )
        if module.training and isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None:
            raise ValueError(
                f"The module {name or 'itself'} ({module}) averages over all batches by an integer count, "
                "which is not carried. Give it a momentum, such as 0.1."
            )
