"""seeded: a context in which torch's random functions are pure functions of a seed.

Each random function of torch is replaced by the one of its name in `functions.TABLE`. What draws and is not
there is refused; what Python's own generators or numpy's draw cannot be seen.
"""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from metafop import tree
from metafop.randomness.functions import TABLE
from metafop.randomness.numbers import Numbers


class seeded(TorchFunctionMode):
    """A context in which torch draws the random numbers of one step, those of `seed`.

    A loss made with `seeded=True` runs in it. A training loop written by hand draws the same numbers with
    the same seed.

    seed: an int64 scalar, from 0 to 2³² - 1 in the first step, then `next_seed(seed)` in each.

    >>> seed = torch.tensor(7)
    >>> with metafop.randomness.seeded(seed):
    ...     first = torch.nn.functional.dropout(torch.ones(5)), torch.randn(2)
    >>> with metafop.randomness.seeded(seed):
    ...     again = torch.nn.functional.dropout(torch.ones(5)), torch.randn(2)
    >>> all(map(torch.equal, first, again))
    True
    """

    def __init__(self, seed: Tensor) -> None:
        super().__init__()
        if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.dim() != 0:
            found = f"{seed.dtype} of shape {tuple(seed.shape)}" if isinstance(seed, Tensor) else repr(seed)
            raise TypeError(f"A seed is an int64 scalar, got {found}. Pass one, such as torch.tensor(0).")
        self.numbers = Numbers(seed)
        self.batch_levels = 0 if torch.compiler.is_compiling() else tree.batch_levels()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WRITTEN_IN_PYTHON:
            with self:  # so that what it calls is replaced
                return _WRITTEN_IN_PYTHON[func](*args, **kwargs)
        name = _known_name(func)
        if not name:
            return func(*args, **kwargs)
        if name == "unflatten":  # a method written in Python, which torch.compile cannot follow from here
            return torch.unflatten(*args, **kwargs)
        if name in _EMPTY:
            # Under vmap over seeds, what is drawn into the tensor has their batch dimension.
            made = func(*args, **kwargs)
            return torch.where(self.numbers.seed.to(made.device) == 0, made, made)
        _refuse(name, kwargs)
        if not torch.compiler.is_compiling() and tree.batch_levels() > self.batch_levels:
            raise ValueError(
                f"A seeded loss draws by {name} inside a vmap of its own, where every example would draw the "
                "same. Draw for all of them before the vmap, and map over what was drawn."
            )
        named = {_RENAMED.get(k, k): v for k, v in kwargs.items() if k not in _IGNORED}
        return TABLE[name](self.numbers, *args, **named)


_EMPTY = {"empty", "empty_like", "new_empty", "new"}
_IGNORED = {"generator", "out", "requires_grad", "layout", "pin_memory", "memory_format"}
_RENAMED = {"from": "low", "to": "high", "a": "low", "b": "high", "self": "input", "tensor": "input"}


@torch.compiler.assume_constant_result  # torch.compile does not know what a function of torch is called
def _known_name(func: Any) -> str:
    """Return the function's name if it is not to be called as it is, or nothing."""
    name = getattr(func, "__name__", "").partition(".")[0]  # that of an overload is "dropout.default"
    return name if name in _EMPTY or name == "unflatten" or _draws(name) else ""


@cache
def _draws(name: str) -> bool:
    operation = getattr(torch.ops.aten, name, None)
    if operation is None or not isinstance(operation, type(torch.ops.aten.rand)):
        return name == "kaiming_uniform_"  # of torch.nn.init, which hides what it calls
    tags = [getattr(operation, overload).tags for overload in operation.overloads()]
    return any(torch.Tag.nondeterministic_seeded in each for each in tags)


def _refuse(name: str, kwargs: dict[str, Any]) -> None:
    if name not in TABLE:
        raise ValueError(
            f"A seeded loss cannot draw by torch's {name}. "
            "Make its numbers from those of torch.rand or torch.randn, or pass them with the batch."
        )
    if kwargs.get("generator") is not None:
        raise ValueError(
            f"A seeded loss draws by {name} with a generator, whose state is not in the carry. "
            "Leave the generator out: the numbers come from the seed."
        )
    if kwargs.get("out") is not None or kwargs.get("requires_grad"):
        raise ValueError(f"A seeded loss draws by {name} with out= or requires_grad=. Leave them out.")


def unasked(function: Any) -> Callable[..., Any]:
    """Return a function of torch that runs as it is written, and does not ask first who replaces it."""
    names = {k: v for k, v in function.__globals__.items() if k != "__name__"}  # torch.compile imports by it
    names |= {k: _no for k in names if k.startswith("has_torch_function")}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def _without_indices(pool: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: pool(*args, **kwargs)[0]


def _no(*args: Any) -> bool:
    return False


_WRITTEN_IN_PYTHON = {
    **{
        function: unasked(function)
        for function in (
            F.dropout,
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.alpha_dropout,
            F.feature_alpha_dropout,
            F.rrelu,
            F.gumbel_softmax,
            F.multi_head_attention_forward,
            F.fractional_max_pool2d_with_indices,
            F.fractional_max_pool3d_with_indices,
        )
    },
    F.fractional_max_pool2d: _without_indices(F.fractional_max_pool2d_with_indices),
    F.fractional_max_pool3d: _without_indices(F.fractional_max_pool3d_with_indices),
}
