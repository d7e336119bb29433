"""Functions compiled once: torch.compile with the settings that serve derivatives best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

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
    """Return the function as one graph.

    Convolutions keep the layout of their data: turned to channels last, as torch's compiler prefers, second
    derivatives of batch norm take twice the time on a CPU.
    """
    return torch.compile(function, fullgraph=True, options={"layout_optimization": False})
