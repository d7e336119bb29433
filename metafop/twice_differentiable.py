"""Operations whose second derivative torch lacks or gets wrong, written out in others that have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from metafop import tree
from metafop.attention import fused_attention, serves
from metafop.randomness.mode import unasked


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    fused: bool = False,
) -> Tensor:
    """softmax(q kᵀ scale + mask) v, by torch's own unfused form: its fused one has no second derivative.

    fused: whether it may be fused, outside of transforms, where its second derivative is written out.
    """
    if fused and not tree.is_transforming() and serves(query, key, value, attn_mask, dropout_p):
        return fused_attention(query, key, value, is_causal, scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
    unfused = torch.ops.aten._scaled_dot_product_attention_math
    return unfused(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v/‖v‖, a norm for each index of `dim`; one norm for all if `dim` is -1.

    The second derivative of torch's fused one is wrong.
    """
    kept = None if dim == -1 else dim % v.dim()
    others = [d for d in range(v.dim()) if d != kept]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


class TwiceDifferentiable(TorchFunctionMode):
    """A context in which attention and weight norm are written out. `used` tells whether one was called.

    A mode of torch functions belongs to one thread alone.

    fused: whether attention may be fused outside of transforms: not where the same step is also taken inside
        one, and its bits are compared (False).
    """

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.used, self.fused = False, fused

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.multi_head_attention_forward:
            with self:  # so that what it calls is written out
                return _multi_head_attention(*args, **(kwargs or {}))
        written_out = _WRITTEN_OUT.get(func)
        self.used = self.used or written_out is not None
        if self.fused and func is F.scaled_dot_product_attention:
            return attention(*args, **(kwargs or {}), fused=True)
        return (written_out or func)(*args, **(kwargs or {}))


_multi_head_attention = unasked(F.multi_head_attention_forward)
_WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: attention,
    torch._weight_norm: weight_norm,
}
