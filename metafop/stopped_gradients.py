"""Stopped gradients: what a loss stops for its gradient stays in the derivative of a run."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from metafop import tree
from metafop.hidden_derivatives import hides_a_derivative_here, may_hide_a_derivative
from metafop.randomness.mode import unasked


@dataclass
class Record:
    """What a loss was seen to do to its derivatives, and in which lines: "detach (model.py, line 12)".

    `stopped` are gradients that it stops. `unknown` is what may hide a derivative: numbers taken out of
    tensors, and functions whose second derivative is not known to be right. `transformed` says whether
    torch.func took a gradient that torch.autograd alone was to record.
    """

    stopped: dict[str, None] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)
    transformed: bool = False

    def __bool__(self) -> bool:
        return bool(self.stopped or self.unknown)

    def add(self, other: Record) -> None:
        self.stopped |= other.stopped
        self.unknown |= other.unknown
        self.transformed |= other.transformed


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


def note_transformed() -> None:
    """Note that torch.func takes a gradient that torch.autograd alone was to record."""
    add(Record(transformed=True))


def inner_alone(recorded: bool) -> AbstractContextManager[Any]:
    """A context for one more derivative, in which `detach` and `no_grad` stop that one and those inside it.

    Derivatives that are being taken around it, by torch.func or `recorded` by torch.autograd, go on through
    what is stopped: a run depends on the value of what its loss stops (docs/math.md, 27). torch itself would
    stop them all.
    """
    if torch.compiler.is_compiling() or _all.get() or not (recorded or tree.is_differentiating()):
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
        self.level, self.stopped = level, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plain = torch.is_grad_enabled() and not self.stopped and tree.transforms() == self.level
        if plain and not is_special(func):
            return func(*args, **kwargs)
        if func in _CALL_OTHERS:
            with self:  # so that what it calls is seen
                return _CALL_OTHERS[func](*args, **kwargs)
        name = may_hide_a_derivative(func) or hides_a_derivative_here(func, args, kwargs, self.level)
        if name:
            self._note("unknown", name, (args, kwargs))
        if func in _DETACH:
            self._note("stopped", "detach", args)
            return self._constant(args[0])
        if func in _DETACH_IN_PLACE:
            raise NotImplementedError(
                f"The loss calls detach_ ({_place()}), which changes a tensor in a way that the derivative "
                "of a run cannot follow. Write x = x.detach()."
            )
        return func(*args, **kwargs) if torch.is_grad_enabled() else self._without_grad(func, args, kwargs)

    def _without_grad(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function as no_grad does for derivatives of this level, and record it for those around.

        It is given copies, and what it writes is copied back: what is recorded must outlast later writes,
        which no_grad allows.
        """
        if not any(map(_takes_part, tree.leaves((args, kwargs)))):
            return func(*args, **kwargs)
        self._note("stopped", "no_grad", (args, kwargs))
        out = kwargs.get("out")
        others = {k: v for k, v in kwargs.items() if k != "out"}  # torch.autograd does not record it
        with torch.inference_mode(False), torch.enable_grad():
            given = _Given(self.level, copied=getattr(func, "__name__", "") not in _VIEWS)
            result = given.returned(func(*tree.map(given, args), **tree.map(given, others)))
            if out is None:
                return result
            for target, made in zip(tree.leaves(out), tree.leaves(result), strict=True):
                if target.shape != made.shape:
                    target.resize_(made.shape)
                self._constant(target).copy_(made)
            return out

    def _constant(self, x: Any) -> Any:
        return tree.without_levels(x, self.level)

    def _note(self, kind: Literal["stopped", "unknown"], what: str, given: Any) -> None:
        """Record what is done to tensors that a gradient depends on or, once it is stopped, a run."""
        self.stopped = self.stopped or kind == "stopped"
        record, level = _record.get(), self.level if kind == "stopped" else 0
        if record is not None and any(tree.is_tracked_from(x, level) for x in tree.leaves(given)):
            getattr(record, kind)[f"{what} ({_place()})"] = None


class _Given:
    """What a function is given for the tensors of a call, one for each: constants of a level, or copies."""

    def __init__(self, level: int, copied: bool) -> None:
        self.level, self.copied = level, copied
        self.tensors: dict[int, tuple[Tensor, Tensor, Tensor, int]] = {}

    def __call__(self, x: Any) -> Any:
        if not _takes_part(x):
            return x
        if id(x) not in self.tensors:
            constant = tree.without_levels(x, self.level)
            passed = constant.clone() if self.copied else constant
            self.tensors[id(x)] = (x, constant, passed, _version(passed))
        return self.tensors[id(x)][2]

    def returned(self, result: Any) -> Any:
        """Return what the function returned: its arguments where it returned these, written into or not."""
        arguments = {id(passed): x for x, _, passed, _ in self.tensors.values()}
        for _, constant, passed, version in self.tensors.values():
            if self.copied and _version(passed) != version:
                constant.copy_(passed)
        copied = self.copied

        def own(x: Any) -> Any:
            if id(x) in arguments:
                return arguments[id(x)]
            return x.clone() if copied and isinstance(x, Tensor) else x

        return tree.map(own, result)


def _takes_part(x: Any) -> bool:
    """Return whether a derivative may depend on `x`."""
    return isinstance(x, Tensor) and (tree.is_wrapped(x) or x.requires_grad)


@cache
def is_special(func: Any) -> bool:
    """Return whether a function may be another to derivatives of a level than to those around it."""
    known = func in _CALL_OTHERS or func in _DETACH or func in _DETACH_IN_PLACE or func is F.embedding
    return known or bool(may_hide_a_derivative(func))


def _version(x: Tensor) -> int:
    return tree.unwrapped(x)._version


def _place() -> str:
    """Return the line of the caller's code, outside torch and this library."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_globals.get("__name__", "torch").partition(".")[0] in ("torch", "metafop"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}" if frame else "torch"


_DETACH = {Tensor.detach, torch.detach, vars(torch._C.TensorBase)["data"].__get__}
_DETACH_IN_PLACE = {Tensor.detach_, torch.detach_}
# Functions of torch that stop a gradient inside, or call what the user wrote: hooks, backward of a function.
_CALL_OTHERS: dict[Any, Callable[..., Any]] = {
    each: unasked(each)
    for each in (
        F.gumbel_softmax,
        F.gaussian_nll_loss,
        torch.autograd.grad,
    )
}
# What they return lies in the memory of their argument, and none of them records its numbers. "__get__" is
# that of a property, such as T.
_VIEWS = {
    *("__get__", "__getitem__", "as_strided", "broadcast_to", "chunk", "diagonal", "dsplit", "expand"),
    *("expand_as", "flatten", "hsplit", "imag", "movedim", "moveaxis", "narrow", "permute", "ravel", "real"),
    *("reshape", "reshape_as", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "tensor_split"),
    *("transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "view_as_complex"),
    *("view_as_real", "vsplit"),
}
