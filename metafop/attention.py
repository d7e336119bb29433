"""Scaled dot-product attention whose second derivative is written out, and keeps no matrix of all pairs.

torch's fused attention has none, and its unfused one keeps a dozen matrices of queries by keys for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_fused: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_fused_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

ROWS = 64  # queries whose pairs are held at once


def serves(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float) -> bool:
    """Return whether the fused kernels serve these: on a CPU, in four dimensions, no mask and no dropout."""
    same = (
        query.shape[:2] == key.shape[:2] == value.shape[:2] and query.dim() == key.dim() == value.dim() == 4
    )
    kinds = query.dtype == key.dtype == value.dtype and query.dtype in (torch.float32, torch.float64)
    sizes = query.shape[-1] == key.shape[-1] == value.shape[-1] and key.shape[-2] == value.shape[-2]
    on_cpu = all(x.device.type == "cpu" for x in (query, key, value))
    return (
        attn_mask is None and dropout_p == 0.0 and on_cpu and same and kinds and sizes and query.numel() > 0
    )


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> Tensor:
    """Return softmax(scale q kᵀ) v, twice differentiable."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return _Attention.apply(query, key, value, is_causal, scale)


class _Attention(torch.autograd.Function):
    """o = P v,    P = softmax(S),    S = scale q kᵀ"""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
        o, logsumexp = _fused(q, k, v, 0.0, is_causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, logsumexp)
        ctx.given = (is_causal, scale)
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, o, logsumexp = ctx.saved_tensors
        return *_AttentionBackward.apply(d_o, q, k, v, o.detach(), logsumexp, *ctx.given), None, None


class _AttentionBackward(torch.autograd.Function):
    """∂v = Pᵀ ∂o,    ∂q = scale ∂S k,    ∂k = scale ∂Sᵀ q

    ∂S = P ⊙ (∂P - δ),    ∂P = ∂o vᵀ,    δ = rowsum(∂o ⊙ o)
    """

    @staticmethod
    def forward(ctx: Any, d_o: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, o, logsumexp, is_causal, scale = given
        ctx.save_for_backward(d_o, q, k, v, o, logsumexp)
        ctx.given = (is_causal, scale)
        return _fused_backward(d_o, q, k, v, o, logsumexp, 0.0, is_causal, scale=scale)

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "Fused attention has two derivatives, and a third is asked for. Take it inside a transform "
                "of torch.func, such as torch.func.grad."
            )
        d_o, q, k, v, o, logsumexp = ctx.saved_tensors
        is_causal, scale = ctx.given
        d2_o, d_q = torch.empty_like(d_o), torch.empty_like(q)
        d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys in _blocks(q.shape[-2], k.shape[-2], is_causal):
            of_rows = [x[..., rows, :] for x in (d_o, q, o, a, logsumexp.unsqueeze(-1))]
            of_keys = [x[..., keys, :] for x in (k, v, b, c)]
            found = _second(*of_rows, *of_keys, first=rows.start if is_causal else None, scale=scale)
            d2_o[..., rows, :], d_q[..., rows, :] = found[:2]
            d_k[..., keys, :] += found[2]
            d_v[..., keys, :] += found[3]
        return d2_o, d_q, d_k, d_v, None, None, None, None


WRITTEN_OUT = {_Attention, _AttentionBackward}


def _blocks(queries: int, keys: int, is_causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield some queries at a time, and the keys that they see."""
    for start in range(0, queries, ROWS):
        stop = min(start + ROWS, queries)
        yield slice(start, stop), slice(0, min(stop, keys) if is_causal else keys)


def _second(
    d_o: Tensor,
    q: Tensor,
    o: Tensor,
    a: Tensor,
    logsumexp: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    first: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the derivatives of ⟨a, ∂q⟩ + ⟨b, ∂k⟩ + ⟨c, ∂v⟩ in ∂o, q, k and v, for some rows of P.

    E = scale (a kᵀ + q bᵀ),    e = rowsum(P ⊙ E),    F = P ⊙ (E - e)
    P̄ = E ⊙ (∂P - δ) - e ∂P + ∂o cᵀ,    S̄ = P ⊙ (P̄ - rowsum(P ⊙ P̄))
    ∂o: F v + P c,    q: scale (S̄ k + ∂S b),    k: scale (S̄ᵀ q + ∂Sᵀ a),    v: Fᵀ ∂o

    first: the number of the first row where each sees the keys up to its own alone.
    """
    p = torch.exp(scale * (q @ k.mT) - logsumexp)
    if first is not None:
        p = p.tril(first)
    d_p = d_o @ v.mT
    less = d_p - (d_o * o).sum(-1, keepdim=True)
    d_s = p * less
    outer = scale * (a @ k.mT + q @ b.mT)
    mean = (p * outer).sum(-1, keepdim=True)
    p_bar = outer * less - mean * d_p + d_o @ c.mT
    s_bar = p * (p_bar - (p * p_bar).sum(-1, keepdim=True))
    f = p * (outer - mean)
    return (
        f @ v + p @ c,
        scale * (s_bar @ k + d_s @ b),
        scale * (s_bar.mT @ q + d_s.mT @ a),
        f.mT @ d_o,
    )
