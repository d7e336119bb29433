"""Which functions may hide a derivative: those whose second derivative torch does not have, or has wrong."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from metafop import tree


@cache
def may_hide_a_derivative(func: Any) -> str:
    """Return a name for the function if it may hide a derivative, or nothing.

    May, not must: what is named is compared with a difference of gradients (docs/math.md, 27).
    """
    name = getattr(func, "__name__", "")
    return _name(func) if func in TO_NUMBERS or _is_foreign(func) or name in _WRONG_TWICE else ""


def hides_a_derivative_here(func: Any, args: tuple, kwargs: dict[str, Any], level: int) -> str:
    """Return a name for the call if, given what it is given, it may hide a derivative around `level`."""
    name = getattr(func, "__name__", "")
    if name not in _ARITHMETIC and any(_is_stopped_number(x, level) for x in (*args, *kwargs.values())):
        return name  # which may take it for a number of Python
    if func is F.embedding and _has_rows_without_gradients(*args, **kwargs):
        return name
    if tree.transforms() == level:
        return ""
    if tree.is_without_grad_from(level):
        return "no_grad around a derivative"
    return name if name in _WRONG_THRICE else ""


def _is_foreign(func: Any) -> bool:
    """Return whether a function is none of torch's public ones, whose second derivatives torch tests."""
    if isinstance(func, torch._ops.OperatorBase | torch._ops.OpOverloadPacket):  # or autograd.Function
        return True
    name = getattr(func, "__name__", "")
    return name.startswith("_") and not name.startswith("__")


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func)).strip("_")
    return "autograd.Function" if name == "custom_function_call" else name


def _has_rows_without_gradients(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> bool:
    return padding_idx is not None or scale_grad_by_freq


def _is_stopped_number(x: Any, level: int) -> bool:
    return (
        isinstance(x, Tensor)
        and x.dim() == 0
        and tree.is_wrapped(x)
        and not tree.is_tracked_from(x, level)
        and tree.is_tracked_from(x, 0)
    )


# What takes numbers out of tensors; and hooks, which put others in place of a gradient.
TO_NUMBERS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__float__,
    Tensor.__complex__,
    Tensor.__format__,
    Tensor.new_tensor,
    Tensor.register_hook,
    torch.tensor,
    torch.as_tensor,
}
# Their gradients are not the derivatives of what they compute, or torch's second derivative is not theirs.
_WRONG_TWICE = {
    *("as_strided_scatter", "fake_quantize_per_channel_affine", "fake_quantize_per_tensor_affine", "set_"),
    *("constant_", "kaiming_uniform_"),  # of torch.nn.init, which write without a gradient
}
# torch's third derivative of these is wrong: it counts where a loss takes a derivative of its own.
_WRONG_THRICE = {"batch_norm", "instance_norm", "layer_norm"}
# What takes a tensor of one number as a tensor.
_ARITHMETIC = {
    *(
        "add",
        "sub",
        "mul",
        "div",
        "true_divide",
        "pow",
        "rsub",
        "maximum",
        "minimum",
        "where",
        "lerp",
        "stack",
    ),
    *("add_", "sub_", "mul_", "div_", "copy_", "eq", "ne", "lt", "le", "gt", "ge", "dot", "cat", "clone"),
    *("__add__", "__sub__", "__mul__", "__truediv__", "__pow__", "__radd__", "__rsub__", "__rmul__"),
    *("__rtruediv__", "__rpow__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__neg__", "__get__"),
    *(
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__bool__",
        "detach",
        "sum",
        "mean",
        "exp",
        "log",
        "sqrt",
        "abs",
    ),
    *("square", "tanh", "sigmoid", "clamp", "expand", "expand_as", "reshape", "view", "unsqueeze", "to"),
    *("__setitem__", "__getitem__", "dim", "size", "reciprocal", "neg", "rsqrt", "softplus", "log1p"),
}
