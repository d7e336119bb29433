"""Stopped gradients: what a loss stops for its gradient stays in the derivative of a run."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from metafop import tree
from metafop.randomness.mode import unasked


@dataclass
class Record:
    """What a loss was seen to do to its derivatives, and in which lines: "detach (model.py, line 12)".

    `stopped` are gradients that it stops. `unknown` is what hides a derivative: numbers taken out of tensors,
    and functions whose second derivative is not torch's own.
    """

    stopped: dict[str, None] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stopped or self.unknown)

    def add(self, other: Record) -> None:
        self.stopped |= other.stopped
        self.unknown |= other.unknown


_record: ContextVar[Record | None] = ContextVar("record", default=None)


@contextmanager
def recording() -> Iterator[Record]:
    """A context that yields a record of what losses do in it. One around it is given the same."""
    record, outer = Record(), _record.get()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)
        if outer is not None:
            outer.add(record)


def add(record: Record) -> None:
    """Add what was recorded before to the record that is being made."""
    current = _record.get()
    if current is not None:
        current.add(record)


def inner_alone() -> AbstractContextManager[Any]:
    """A context for one more derivative, in which `detach` and `no_grad` stop that one and those inside it.

    Derivatives that are being taken around it go on through what is stopped: a run depends on the value of
    what its loss stops (docs/math.md, 27). torch itself would stop them all.
    """
    if torch.compiler.is_compiling() or not tree.is_differentiating() or _all.get():
        return nullcontext()
    return _InnerAlone(tree.transforms() + 1)


@contextmanager
def all_derivatives() -> Iterator[None]:
    """A context in which `detach` and `no_grad` stop all derivatives, as torch does: to compare with."""
    token = _all.set(True)
    try:
        yield
    finally:
        _all.reset(token)


_all: ContextVar[bool] = ContextVar("all", default=False)


class _InnerAlone(TorchFunctionMode):
    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _STOP_INSIDE:
            with self:  # so that what it calls is seen
                return _STOP_INSIDE[func](*args, **kwargs)
        if func in _TO_NUMBERS or _is_foreign(func):
            self._note("unknown", _name(func), (args, kwargs))
        if func in _DETACH:
            self._note("stopped", "detach", args)
            return self._constant(args[0])
        return func(*args, **kwargs) if torch.is_grad_enabled() else self._without_grad(func, args, kwargs)

    def _without_grad(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function as no_grad does for derivatives of this level, and record it for those around."""
        given = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor) and tree.is_wrapped(x)]
        if not given:
            return func(*args, **kwargs)
        self._note("stopped", "no_grad", given)
        kind, named = _kind(func), dict(kwargs)
        into, out = args[:1] if kind == "writes" else (), named.pop("out", None)
        target = tree.map(self._constant, (into, out))
        with torch.enable_grad():
            others = tree.map(self._constant, (args[len(into) :], named))
            if kind != "views":  # what is recorded of them must outlast what is written into them later
                others = tree.map(_copy, others)
            result = func(*target[0], *others[0], **others[1])
            if out is not None:  # as torch.autograd does not record it
                target[1].copy_(result)
                return out
        return args[0] if into else result

    def _constant(self, x: Any) -> Any:
        return tree.without_levels(x, self.level)

    def _note(self, kind: Literal["stopped", "unknown"], what: str, given: Any) -> None:
        """Record what is done to tensors that a gradient depends on or, once it is stopped, a run."""
        record, level = _record.get(), self.level if kind == "stopped" else 0
        if record is not None and any(tree.is_tracked_from(x, level) for x in tree.leaves(given)):
            getattr(record, kind)[f"{what} ({_place()})"] = None


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func)).strip("_")
    return "autograd.Function" if name == "custom_function_call" else name


def _place() -> str:
    """Return the line of the caller's code, outside torch and this library."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "torch").partition(".")[0] in ("torch", "metafop"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}" if frame else "torch"


def _kind(func: Any) -> Literal["writes", "views", "computes"]:
    """Return whether a function writes into its first argument, returns a part of its memory, or neither."""
    name = getattr(func, "__name__", "")
    if name in _WRITING or (name.endswith("_") and not name.endswith("__")):
        return "writes"
    return "views" if name in _VIEWS else "computes"


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) and tree.is_wrapped(x) else x


def _is_foreign(func: Any) -> bool:
    """Return whether a function is none of torch's public ones, whose second derivatives torch tests."""
    if isinstance(func, torch._ops.OperatorBase | torch._ops.OpOverloadPacket):  # or autograd.Function
        return True
    name = getattr(func, "__name__", "")
    return name == "as_strided_scatter" or (name.startswith("_") and not name.startswith("__"))


_WRITING = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow"))}
# None of these records its argument's numbers. "__get__" is that of a property, such as T.
_VIEWS = {
    *("__get__", "__getitem__", "as_strided", "broadcast_to", "chunk", "diagonal", "dsplit", "expand"),
    *("expand_as", "flatten", "hsplit", "imag", "movedim", "moveaxis", "narrow", "permute", "ravel", "real"),
    *("reshape", "reshape_as", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "tensor_split"),
    *("transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "view_as_complex"),
    *("view_as_real", "vsplit"),
}
# What takes numbers out of tensors.
_TO_NUMBERS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__float__,
    Tensor.__complex__,
    Tensor.new_tensor,
    torch.tensor,
    torch.as_tensor,
}
_DETACH = {
    Tensor.detach,
    Tensor.detach_,
    torch.detach,
    torch.detach_,
    vars(torch._C.TensorBase)["data"].__get__,
}
# Functions of torch, written in Python, that stop a gradient inside.
_STOP_INSIDE: dict[Any, Callable[..., Any]] = {
    each: unasked(each) for each in (F.gumbel_softmax, F.gaussian_nll_loss)
}
