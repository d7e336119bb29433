"""TABLE: for each random function of torch, by name, one that draws its bits from `Numbers`.

Each takes the arguments of torch's function of its name. Those of a name that ends in _ write into their
tensor, as torch's do.
"""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from metafop.randomness.numbers import Numbers

Size = Sequence[int]
Replacement = Callable[..., Any]


def dropout(numbers: Numbers, input: Tensor, p: float, train: bool) -> Tensor:
    """x kept / (1 - p)."""
    return _scaled(numbers, input, input.shape, p) if train and p > 0 else input


def feature_dropout(numbers: Numbers, input: Tensor, p: float, train: bool) -> Tensor:
    """The same, for all of a channel at once."""
    return _scaled(numbers, input, _channels(input), p) if train and p > 0 else input


def alpha_dropout(numbers: Numbers, input: Tensor, p: float, train: bool) -> Tensor:
    return _saturated(numbers, input, input.shape, p) if train and p > 0 else input


def feature_alpha_dropout(numbers: Numbers, input: Tensor, p: float, train: bool) -> Tensor:
    return _saturated(numbers, input, _channels(input), p) if train and p > 0 else input


def _scaled(numbers: Numbers, input: Tensor, shape: Size, p: float) -> Tensor:
    kept = numbers.kept(shape, p, input.device).to(input.dtype)
    return input * (kept / (1 - p) if p < 1 else kept)


def _saturated(numbers: Numbers, input: Tensor, shape: Size, p: float) -> Tensor:
    """a (x kept - α (1 - kept) + α p), where a keeps the variance (Klambauer et al., 2017)."""
    kept = numbers.kept(shape, p, input.device).to(input.dtype)
    if p == 1:
        return input * kept
    alpha = 1.7580993408473766
    a = 1 / math.sqrt((alpha**2 * p + 1) * (1 - p))
    return a * (input * kept + alpha * (kept - 1 + p))


def _channels(input: Tensor) -> Size:
    return (*input.shape[:2], *[1] * (input.dim() - 2))


def rrelu(
    numbers: Numbers, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    if not training:
        return torch.rrelu(input, lower, upper)
    slope = lower + (upper - lower) * numbers.uniform(input.shape, input.dtype, input.device)
    return torch.where(input > 0, input, slope * input)


def attention(
    numbers: Numbers,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """dropout(softmax(scale Q Kᵀ + mask)) V; a query that may attend to no key gets zeros."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        allows = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if allows else scores + attn_mask
    none = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)
    return dropout(numbers, weights, dropout_p, True) @ value


def recurrent(name: str) -> Replacement:
    """Return torch's lstm, gru, rnn_tanh or rnn_relu, layer by layer, with dropout in between."""

    def layers(numbers: Numbers, *args: Any) -> tuple[Tensor, ...]:
        run = getattr(torch, name)
        at = 2 if isinstance(args[3], bool) else 3  # the weights come after those of a packed sequence
        (output, *sizes), state, weights = args[: at - 1], args[at - 1], args[at]
        biases, count, p, train, *form = args[at + 1 :]
        if not (train and p > 0 and count > 1):
            return run(*args)
        size, after = len(weights) // count, []
        before = [x.chunk(count) for x in (state if name == "lstm" else [state])]
        for layer in range(count):
            own = tuple(each[layer] for each in before)
            inputs = (dropout(numbers, output, p, layer > 0), *sizes, own if name == "lstm" else own[0])
            result = run(*inputs, weights[layer * size : (layer + 1) * size], biases, 1, 0.0, train, *form)
            output = result[0]
            after.append(result[1:])
        return output, *(torch.cat(each) for each in zip(*after, strict=True))

    return layers


def rand(numbers: Numbers, *args: Any, size: Any = None, dtype: Any = None, device: Any = None) -> Tensor:
    return numbers.uniform(_shape(args, size), dtype or torch.get_default_dtype(), device)


def randn(numbers: Numbers, *args: Any, size: Any = None, dtype: Any = None, device: Any = None) -> Tensor:
    return numbers.normal(_shape(args, size), dtype or torch.get_default_dtype(), device)


def _shape(args: Sequence[Any], size: Size | None) -> Size:
    """Return the size of rand(2, 3), rand((2, 3)) and rand(size=(2, 3))."""
    if size is not None:
        return size
    return args[0] if args and isinstance(args[0], Sequence) else args


def rand_like(numbers: Numbers, input: Tensor, dtype: Any = None, device: Any = None) -> Tensor:
    return numbers.uniform(input.shape, dtype or input.dtype, device or input.device)


def randn_like(numbers: Numbers, input: Tensor, dtype: Any = None, device: Any = None) -> Tensor:
    return numbers.normal(input.shape, dtype or input.dtype, device or input.device)


def randint(
    numbers: Numbers,
    *args: Any,
    low: int = 0,
    high: int | None = None,
    size: Any = None,
    dtype: Any = torch.int64,
    device: Any = None,
) -> Tensor:
    if size is None:
        args, size = args[:-1], args[-1]
    low, high = _range(args, low, high)
    return _integers(numbers, size, low, high, device).to(dtype)


def randint_like(
    numbers: Numbers,
    input: Tensor,
    *args: Any,
    low: int = 0,
    high: int | None = None,
    dtype: Any = None,
    device: Any = None,
) -> Tensor:
    low, high = _range(args, low, high)
    return _integers(numbers, input.shape, low, high, device or input.device).to(dtype or input.dtype)


def random_(numbers: Numbers, input: Tensor, *args: int, low: int = 0, high: int | None = None) -> Tensor:
    if not args and high is None:
        high = 2**24 if input.is_floating_point() else min(2**31 - 1, torch.iinfo(input.dtype).max)
    low, high = _range(args, low, high)
    return input.copy_(_integers(numbers, input.shape, low, high, input.device))


def _range(args: Sequence[int], low: int, high: int | None) -> tuple[int, int]:
    """Return low and high of f(high), f(low, high), f(low, high=high) and f(low=low, high=high)."""
    if high is None:
        *args, high = args
    return (args[0] if args else low), high


def _integers(numbers: Numbers, shape: Size, low: int, high: int, device: Any) -> Tensor:
    """low + ⌊bits (high - low) / 2³²⌋, whose product stays below 2⁶³."""
    if not 0 < high - low <= 2**31:
        raise ValueError(
            f"A seeded loss draws integers from a range of 1 to 2**31, got {low} to {high}. "
            "Pass a range within these."
        )
    return low + (numbers.bits(shape, device) * (high - low) >> 32)


def randperm(numbers: Numbers, n: int, dtype: Any = torch.int64, device: Any = None) -> Tensor:
    return numbers.bits((n,), device).argsort(stable=True).to(dtype)


def normal(
    numbers: Numbers,
    mean: float | Tensor = 0.0,
    std: float | Tensor = 1.0,
    size: Any = None,
    dtype: Any = None,
    device: Any = None,
) -> Tensor:
    """mean + std z, without derivatives, as torch's has none."""
    given = [x for x in (mean, std) if isinstance(x, Tensor)]
    if given:
        size = torch.broadcast_shapes(*(x.shape for x in given))
        dtype, device = given[0].dtype, given[0].device
    z = numbers.normal(size, dtype or torch.get_default_dtype(), device)
    return (mean + std * z).detach()


def bernoulli(numbers: Numbers, input: Tensor, p: float | Tensor | None = None) -> Tensor:
    chance = input if p is None else p
    return (numbers.uniform(input.shape, torch.float64, input.device) < chance).to(input.dtype)


def bernoulli_(numbers: Numbers, input: Tensor, p: float | Tensor = 0.5) -> Tensor:
    return input.copy_(bernoulli(numbers, input, p))


def uniform_(numbers: Numbers, input: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return input.copy_(low + (high - low) * numbers.uniform(input.shape, input.dtype, input.device))


def normal_(numbers: Numbers, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return input.copy_(mean + std * numbers.normal(input.shape, input.dtype, input.device))


def log_normal_(numbers: Numbers, input: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return input.copy_((mean + std * numbers.normal(input.shape, torch.float64, input.device)).exp())


def exponential_(numbers: Numbers, input: Tensor, lambd: float = 1.0) -> Tensor:
    return input.copy_(numbers.exponential(input.shape, input.device) / lambd)


def geometric_(numbers: Numbers, input: Tensor, p: float) -> Tensor:
    """⌈E / -log(1 - p)⌉ for an exponential E: how many trials up to the first success."""
    return input.copy_((numbers.exponential(input.shape, input.device) / -math.log1p(-p)).ceil())


def cauchy_(numbers: Numbers, input: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    turns = numbers.inside(input.shape, input.device) - 0.5
    return input.copy_(median + sigma * (math.pi * turns).tan())


def _written(function: Replacement) -> Replacement:
    """Return the same function, which writes what it returns into its tensor."""

    def in_place(numbers: Numbers, input: Tensor, *args: Any) -> Tensor:
        return input.copy_(function(numbers, input, *args))

    return in_place


_LAYERS = (dropout, feature_dropout, alpha_dropout, feature_alpha_dropout, rrelu)
_FRESH = (rand, rand_like, randn, randn_like, randint, randint_like, randperm, normal, bernoulli)
_IN_PLACE = (bernoulli_, uniform_, normal_, log_normal_, exponential_, geometric_, cauchy_, random_)

TABLE: dict[str, Replacement] = {
    **{function.__name__: function for function in (*_LAYERS, *_FRESH, *_IN_PLACE)},
    **{f"{function.__name__}_": _written(function) for function in _LAYERS},
    **{name: recurrent(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "scaled_dot_product_attention": attention,
}
