"""Where operations are written out: in a mode of torch functions, which belongs to one thread alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from metafop.randomness.mode import unasked
from metafop.written_out import attention, weight_norm


class WrittenOut(TorchFunctionMode):
    """A context in which attention and weight norm can be differentiated twice.

    torch's fused attention has no second derivative, and that of its fused weight norm is wrong. `used` tells
    whether one of them was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.multi_head_attention_forward:
            with self:  # so that what it calls is written out
                return _multi_head_attention(*args, **(kwargs or {}))
        written_out = _FORMS.get(func)
        self.used = self.used or written_out is not None
        return (written_out or func)(*args, **(kwargs or {}))


_multi_head_attention = unasked(F.multi_head_attention_forward)
_FORMS: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: attention,
    torch._weight_norm: weight_norm,
}
