"""The gradient of a loss: recorded by torch.autograd, or taken by torch.func where that is needed."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import grad_and_value

from metafop import stopped_gradients, tree
from metafop.recordable import NotRecordable, Recordable, has_foreign
from metafop.types import Buffers, Params

Objective = Callable[[Params], tuple[Tensor, Buffers]]


def loss_gradient(objective: Objective, params: Params, recorded: bool) -> tuple[Params, Tensor, Buffers]:
    """Return the gradient of an `objective` at `params`, its value, and the buffers after it.

    recorded: whether torch.autograd is to record how they come about, for a derivative taken around.

    torch.autograd takes two thirds of the time of torch.func, on small tensors. It cannot be used inside a
    transform of torch.func; nor, where something is recorded, for a loss that stops a gradient or may hide a
    derivative: torch.autograd would stop it in the derivative of the run as well (docs/math.md, 27).
    """
    if not torch.compiler.is_compiling() and not tree.is_transforming():
        try:
            return _by_autograd(objective, params, recorded)
        except Exception:  # below it is no fault, or it is explained
            stopped_gradients.note_transformed()
    with stopped_gradients.inner_alone(recorded):
        grads, (value, buffers) = grad_and_value(objective, has_aux=True)(params)
    return grads, value, buffers


def _by_autograd(objective: Objective, params: Params, recorded: bool) -> tuple[Params, Tensor, Buffers]:
    # Other tensors, so that the gradient is that in these alone: not in what else was computed of them.
    own = {k: p.view_as(p) if recorded and p.requires_grad else _leaf(p) for k, p in params.items()}
    with torch.enable_grad(), disable_saved_tensors_hooks("saved tensor hooks"):
        with Recordable(recorded):
            value, buffers = objective(own)
        if recorded and has_foreign(value, own.values()):
            raise NotRecordable
        found = torch.autograd.grad(value, list(own.values()), create_graph=recorded, allow_unused=True)
    if all(g is None for g in found):
        raise NotRecordable
    grads = {k: torch.zeros_like(own[k]) if g is None else g for k, g in zip(own, found, strict=True)}
    return grads, value if recorded else value.detach(), buffers


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
