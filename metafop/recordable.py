"""Which losses torch.autograd alone records right: those that do nothing that only torch.func follows."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from metafop import tree
from metafop.attention import WRITTEN_OUT
from metafop.hidden_derivatives import hides_a_derivative_here
from metafop.stopped_gradients import is_special


class NotRecordable(Exception):
    """What torch.autograd records of a loss would not be right, or nothing that torch.func allows."""


class Recordable(TorchFunctionMode):
    """A context in which a loss raises `NotRecordable` where torch.func does other than torch.autograd.

    recorded: whether a derivative is taken around the gradient: the loss may then stop none, nor hide one.
    """

    def __init__(self, recorded: bool) -> None:
        super().__init__()
        self.recorded = recorded

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # a function that is compiled inside the loss would trace this mode
            raise NotRecordable
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind == "writes":
            self._refuse(not _is_recorded(args[0]) and _any_recorded(args[1:], kwargs))
        elif kind == "changes":
            self._refuse(_any_recorded(args, kwargs))
        if self.recorded and (
            kind == "stops"
            or not torch.is_grad_enabled()
            or tree.is_transforming()
            or (kind == "embedding" and hides_a_derivative_here(func, args, kwargs, level=0))
        ):
            self._refuse(_any_recorded(args, kwargs))
        return func(*args, **kwargs)

    def _refuse(self, condition: bool) -> None:
        if condition:
            raise NotRecordable


Kind = Literal["plain", "stops", "writes", "changes", "embedding"]


@cache
def _kind(func: Any) -> Kind:
    """Return what a function may do that torch.func follows and torch.autograd does not, or refuses.

    It may stop a gradient or hide a derivative, write into a tensor that is no part of the gradient, or
    change how a tensor is recorded.
    """
    if func in _CHANGES:
        return "changes"
    if func is F.embedding:
        return "embedding"
    if is_special(func):
        return "stops"
    name = getattr(func, "__name__", "")
    writes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
    return "writes" if writes else "plain"


_WRITES = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "floordiv"))}
_data: Any = vars(torch._C.TensorBase)["data"]
_CHANGES = {_data.__get__, _data.__set__, Tensor.requires_grad_, Tensor.backward, torch.autograd.backward}


def _any_recorded(*given: Any) -> bool:
    return any(map(_is_recorded, tree.leaves(given)))


def _is_recorded(x: Any) -> bool:
    return isinstance(x, Tensor) and tree.is_recorded(x)


def has_foreign(value: Tensor, inputs: Iterable[Tensor]) -> bool:
    """Return whether an autograd.Function lies between inputs and value: torch does not test its derivatives.

    Its second derivative may be wrong, and no mode of torch functions sees it.
    """
    waiting: list[Any] = [value.grad_fn]
    known = {x.grad_fn for x in inputs} | {None}
    while waiting:
        node = waiting.pop()
        if node in known:
            continue
        known.add(node)
        if isinstance(node, BackwardCFunction) and getattr(node, "_forward_cls", None) not in WRITTEN_OUT:
            return True
        waiting += [each for each, _ in node.next_functions]
    return False
