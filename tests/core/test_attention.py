"""Fused attention has the derivatives of the unfused, twice, and keeps no matrix of all pairs."""

from functools import partial
from typing import Any

import pytest
import torch
from memory import peak_of_tensors
from problems import every

from metafop.attention import ROWS, fused_attention, serves
from metafop.twice_differentiable import attention

SIZES = {"few": (5, 5), "more keys": (3, 9), "more queries": (9, 3), "blocks": (2 * ROWS + 3, 2 * ROWS + 3)}


causal: Any = partial(fused_attention, is_causal=True, scale=None)
unfused_causal: Any = partial(attention, is_causal=True)


def derivatives(attend: Any, tensors, cotangents):
    """Attention, its gradient in q, k and v, and the gradients of that in q, k, v and ∂o."""
    inputs = [x.clone().requires_grad_() for x in tensors]
    out = attend(*inputs)
    d_out = cotangents[0].clone().requires_grad_()
    grads = torch.autograd.grad(out, inputs, d_out, create_graph=True)
    second = torch.autograd.grad(grads, [*inputs, d_out], cotangents[1:])
    return [x.detach() for x in (out, *grads, *second)]


def given(sizes, generator, dtype=torch.float64) -> Any:
    queries, keys = sizes

    def draw(count):
        # As models make them: heads beside one another in memory.
        return torch.randn(2, count, 3, 4, generator=generator, dtype=dtype).transpose(1, 2)

    tensors: Any = draw(queries), draw(keys), draw(keys)
    return tensors, (draw(queries), *map(torch.randn_like, tensors))


@every("is_causal", {"causal": True, "all": False})
@every("scale", {"usual": None, "given": 0.3})
@every("sizes", SIZES)
def test_its_two_derivatives_are_those_of_the_unfused(sizes, scale, is_causal, generator):
    tensors, cotangents = given(sizes, generator)
    assert serves(*tensors, attn_mask=None, dropout_p=0.0)
    found = derivatives(partial(fused_attention, is_causal=is_causal, scale=scale), tensors, cotangents)
    expected = derivatives(partial(attention, is_causal=is_causal, scale=scale), tensors, cotangents)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_one_tensor_may_be_query_key_and_value(generator):
    (x, _, _), (c, *_) = given((5, 5), generator)

    def slope(attend):
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad((attend(leaf, leaf, leaf) * c).sum(), leaf, create_graph=True)
        return torch.autograd.grad((g * c.sin()).sum(), leaf)[0]

    expected = slope(unfused_causal)
    torch.testing.assert_close(slope(causal), expected, rtol=1e-11, atol=1e-12)


def test_large_scores_overflow_nowhere(generator):
    tensors, cotangents = given((70, 70), generator)
    tensors = [100 * x for x in tensors]
    assert all(x.isfinite().all() for x in derivatives(causal, tensors, cotangents))


@every(
    "change",
    {
        "a mask": lambda q, k, v: (q, k, v, torch.ones(5, 5, dtype=torch.bool), 0.0),
        "dropout": lambda q, k, v: (q, k, v, None, 0.1),
        "fewer heads of keys": lambda q, k, v: (q, k[:, :1], v[:, :1], None, 0.0),
        "wider values": lambda q, k, v: (q, k, torch.cat([v, v], -1), None, 0.0),
        "two types": lambda q, k, v: (q, k.float(), v.float(), None, 0.0),
        "half precision": lambda q, k, v: (q.bfloat16(), k.bfloat16(), v.bfloat16(), None, 0.0),
        "three dimensions": lambda q, k, v: (q[0], k[0], v[0], None, 0.0),
        "another device": lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta"), None, 0.0),
    },
)
def test_what_the_kernels_do_not_serve_is_left_to_the_unfused(change, generator):
    tensors, _ = given((5, 5), generator)
    assert not serves(*change(*tensors))


def test_no_matrix_of_all_pairs_is_kept(generator):
    count = 8 * ROWS
    tensors, cotangents = given((count, count), generator, torch.float32)
    pairs = 6 * count * count * 4  # bytes of a matrix of all pairs, in every head
    fused = peak_of_tensors(lambda: derivatives(causal, tensors, cotangents))
    unfused = peak_of_tensors(lambda: derivatives(unfused_causal, tensors, cotangents))
    assert fused < 2 * pairs
    assert unfused > 5 * pairs


def test_a_third_derivative_is_refused(generator):
    tensors, cotangents = given((5, 5), generator)
    inputs = [x.clone().requires_grad_() for x in tensors]
    first = torch.autograd.grad(causal(*inputs), inputs, cotangents[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"two derivatives, and a third is asked for\. Take it"):
        torch.autograd.grad(first, inputs, cotangents[1:], create_graph=True)
