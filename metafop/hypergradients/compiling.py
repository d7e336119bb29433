"""Functions compiled once: torch.compile with the settings that serve derivatives best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")
F = TypeVar("F", bound=Callable)


class Same(Generic[T]):
    """Equal to another only if both hold the very same object: a key for what cannot be hashed."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def compiled(function: F) -> F:
    """Return a function of tensors as one graph for each of their shapes.

    Everything else that it sees (a training, the structure of trees) must stay what it is: that torch need
    not ask again at each call, and calls its kernels from C++, halves what a small net's step costs besides
    its arithmetic. It shares nothing with other functions of the same code. Data keep their layout:
    torch's compiler would turn those of every convolution apart, and copy them for each that reads them.
    """
    options: dict[str, Any] = {
        "guard_filter_fn": lambda guards: [guard.guard_type in _KEPT for guard in guards],
        "cpp_wrapper": True,
        "layout_optimization": False,
    }
    return torch.compile(  # pyright: ignore[reportCallIssue]: it knows an older signature
        function,
        fullgraph=True,
        dynamic=False,
        isolate_recompiles=True,
        recompile_limit=_SHAPES,
        options=options,
    )


# What is asked at each call: shapes, types, and whether two arguments that were one tensor still are.
_KEPT = ("TENSOR_MATCH", "DUPLICATE_INPUT")
_SHAPES = 64  # of batches, at most
