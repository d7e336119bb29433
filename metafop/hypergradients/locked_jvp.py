"""torch's forward mode, for one thread at a time: its levels belong to the process, not to a thread."""

from collections.abc import Callable
from threading import RLock
from typing import Any

from torch import func

_lock = RLock()


def jvp(function: Callable[..., Any], at: tuple, along: tuple, has_aux: bool = False) -> Any:
    """Return `torch.func.jvp(function, at, along)`, while no other thread takes one."""
    with _lock:
        return func.jvp(function, at, along, has_aux=has_aux)
