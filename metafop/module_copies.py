"""Copies of a module, which compute a loss with the tensors of a call and are then as they were before."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import copy
from collections.abc import Callable, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from metafop import tree
from metafop.twice_differentiable import weight_norm
from metafop.types import Buffers, Params


class Copies:
    """A loss of a model, computed by a copy of the model in which the tensors of the call stand.

    A call has its copy for itself: another thread, or a loss inside the loss, takes another. A copy in which
    the loss fails, or which it leaves changed, is not taken again.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], names: Set[str]) -> None:
        self.model, self.loss, self.places = model, loss, _places(model, names)
        self.frozen = {k: (p, p._version) for k, p in model.named_parameters() if not p.requires_grad}
        self.free, self.compiled = [_Copy(model)], _Copy(model)

    def __call__(self, params: Params, buffers: Buffers, *given: Any) -> tuple[Tensor, Buffers]:
        """Return the loss and the buffers after it, which it may write into or assign to.

        What the loss is `given` besides the model is the batch, and leaves of meta if it takes them.
        """
        tensors = params | buffers
        state = {place: tensors[k] for place, k in self.places.items()}
        value = self._compiled(state, given) if torch.compiler.is_compiling() else self._value(state, given)
        return value, {k: state[f"model.{k}"] for k in buffers}

    def _value(self, state: dict[str, Tensor], given: tuple) -> Tensor:
        try:
            taken = self.free.pop()  # never one for two threads
        except IndexError:
            taken = _Copy(self.model)
        value = taken.value(self.loss, state, given)
        taken.check()
        for name, (param, version) in self.frozen.items():
            if param._version != version:
                raise ValueError(
                    f"The loss writes into the frozen parameter {name!r}, which would change later calls. "
                    "Make it a buffer of the module: what is written into buffers is handed on."
                )
        self.free.append(taken)
        return value

    def _compiled(self, state: dict[str, Tensor], given: tuple) -> Tensor:
        """Return what `_value` does, in a form that torch.compile can follow."""
        self.compiled.check()
        return self.compiled.value(self.loss, state, given)


class _Copy(nn.Module):
    """A module that calls the loss with the model, so that functional_call holds for all that the loss does.

    The model is a copy that shares all tensors with the one given, and takes hardly any memory.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tensors = [x for m in model.modules() for x in tree.leaves(vars(m)) if isinstance(x, Tensor)]
        self.model = copy.deepcopy(model, {id(x): x for x in tensors})
        self.parts = dict(self.model.named_modules())
        self.contents = [_contents(module) for module in self.parts.values()]

    def forward(self, loss: Callable[..., Tensor], *given: Any) -> Tensor:
        return loss(self.model, *given)

    def value(self, loss: Callable[..., Tensor], state: dict[str, Tensor], given: tuple) -> Tensor:
        """Return the loss with the tensors of `state`, in which those that it assigns to are replaced."""
        return functional_call(self, state, (loss, *given), tie_weights=False)  # the places say what is tied

    # torch.compile calls this while it traces, and never when the compiled code runs. A change that compiled
    # code has left is found when torch.compile traces again, as it does before a call that would see it.
    @torch.compiler.assume_constant_result
    def check(self) -> None:
        """Refuse a loss that has left a module with another mode, or with other objects registered in it."""
        contents = [_contents(module) for module in self.parts.values()]
        if contents != self.contents:
            for name, *before_and_after in zip(self.parts, self.contents, contents, strict=True):
                _refuse_change(name, *before_and_after)


def _contents(module: nn.Module) -> tuple[Any, ...]:
    """Return the module's mode, and which objects are registered in it, kind by kind as in `_REMEDIES`."""
    return (
        module.training,
        [*map(id, module._modules.values())],
        [*map(id, module._parameters.values())],
        [*map(id, module._buffers.values())],
        [
            *module._forward_pre_hooks,
            *module._forward_hooks,
            *module._backward_pre_hooks,
            *module._backward_hooks,
        ],
    )


_SOONER = "Change the model before from_module; if its first forward does it, call the model once before."
_REMEDIES = {
    "submodules": _SOONER,
    "parameters": _SOONER,
    "buffers": _SOONER,
    "hooks": "Remove each by its handle before the loss returns.",
}


def _refuse_change(name: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    module = f"the module {name!r}" if name else "the model"
    if before[0] != after[0]:
        mode = "train" if after[0] else "eval"
        raise ValueError(
            f"The loss leaves {module} in {mode} mode, which would change later calls. Switch back before it "
            f"returns, or make a second loss of a model in that mode: from_module(model.{mode}(), …)."
        )
    for (kind, remedy), x, y in zip(_REMEDIES.items(), before[1:], after[1:], strict=True):
        if x != y:
            raise ValueError(
                f"The loss leaves {module} with other {kind} than before, which would change later calls. "
                f"{remedy}"
            )


def copied(model: nn.Module) -> nn.Module:
    """Return a copy: what becomes of the caller's module, its mode for one, is no business of the loss."""
    try:
        model = copy.deepcopy(model)
    except RuntimeError as error:
        raise ValueError(
            "from_module cannot copy the model, which keeps a tensor that was computed, such as its last "
            "activations. Keep none, or pass the model before it is first called."
        ) from error
    module: Any
    for module in model.modules():
        if type(module).__name__ == "_WeightNorm":  # torch has no public name for it
            module.forward = partial(_weight_norm, module.dim)
        if module._parameters:  # what converts these, such as half(), would write into tensors of the caller
            module._apply = _refuse_conversion
    return model


def _weight_norm(dim: int, weight_g: Tensor, weight_v: Tensor) -> Tensor:
    return weight_norm(weight_v, weight_g, dim)


def _refuse_conversion(convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    raise ValueError(
        "The loss converts the parameters of the model, by half(), to(), cuda() or their like, which would "
        "change later calls. Convert the model before from_module, and in the loss what the model returns."
    )


def _places(model: nn.Module, names: Set[str]) -> dict[str, str]:
    """Return the places in a `_Copy` where these tensors stand, and their names: a tied one has several."""
    name_of = {id(x): k for k, x in (*model.named_parameters(), *model.named_buffers()) if k in names}
    own: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
    return {
        place: name_of[id(x)]
        for prefix, module in model.named_modules(prefix="model")
        for place, x in (*module.named_parameters(prefix, **own), *module.named_buffers(prefix, **own))
        if id(x) in name_of
    }
