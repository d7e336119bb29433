"""A first look at a training: how its gradient can be differentiated, and whether that is its derivative."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import jvp, vjp
from torch.overrides import TorchFunctionMode

from metafop import tree
from metafop.hypergradients.operations import WrittenOut
from metafop.hypergradients.per_training import PerTraining
from metafop.hypergradients.unroll import Over, Skip, forward_fails, held
from metafop.types import Batch, Trains


class Look(NamedTuple):
    """How a gradient is to be differentiated, whether operations must be written out for it, whether
    torch.autograd is to be switched off meanwhile, and notes.
    """

    over: Over
    written_out: bool
    unrecorded: bool
    notes: tuple[str, ...]

    @contextmanager
    def operations(self) -> Iterator[None]:
        """The context in which steps are to be taken."""
        with (
            WrittenOut() if self.written_out else nullcontext(),
            torch.no_grad() if self.unrecorded else nullcontext(),
        ):
            yield


def first_look(
    training: Trains, over: Over, skip: Skip, carry: Any, batch: Batch, transposed: bool = True
) -> Look:
    """Return what is found once for each training, before its first step is differentiated.

    `transposed` says that the derivative of the gradient is needed as a pullback. One that is taken forward
    serves for it only if it is symmetric, as it is not where a gradient is stopped.
    """
    batched = tree.is_transforming() and not tree.is_differentiating()
    compares = "hessian" not in skip and not tree.is_transforming()
    return _looks(training, (over, transposed, compares, batched), carry, batch)


def _look(training: Trains, key: tuple[Over, bool, bool, bool], carry: Any, batch: Batch) -> Look:
    (over, transposed, compares, batched), notes = key, []
    with WrittenOut() as operations:
        if over == "forward" and (reason := forward_fails(training, carry, batch)):
            over = "reverse"
            notes.append(reason)
        unrecorded = batched and _works_unrecorded(training, held(carry), batch)
        if not compares:
            training.evaluate(carry, batch)
        elif gap := _gap(training, carry, batch, {over, "reverse"} if transposed else {over}):
            over = "reverse"
            notes.append(_stopped(gap))
    return Look(over, operations.used, unrecorded, tuple(notes))


_looks = PerTraining(_look)


def _works_unrecorded(training: Trains, carry: Any, batch: Batch) -> bool:
    """Return whether the gradient can be pulled back while torch.autograd is switched off.

    Inside vmap it is to be, if it can: otherwise torch 2.15 cannot pull back through batch norm. torch's
    fused LSTM cannot do without.
    """
    params = list(carry.params.values())
    try:
        with torch.no_grad():
            vjp(partial(_grads, training, carry, batch), params)[1](params)
    except RuntimeError:
        return False
    return True


def _grads(training: Trains, carry: Any, batch: Batch, params: list[Tensor]) -> list[Tensor]:
    """Return the gradients at other parameters than those of the carry."""
    seen = training.evaluate(tree.swap(carry, list(carry.params.values()), params), batch)
    return [seen.grads[k] for k in carry.params]


def _stopped(gap: float) -> str:
    return (
        f"At the first step the gradient changes by other than torch's second derivative, by {gap:.1%} along "
        "a random direction: the loss stops a gradient (detach, no_grad, item), or torch's second derivative "
        "is wrong. The path that is stopped is missing in this hypergradient; evolution sees it "
        "(docs/math.md, 27)."
    )


def _gap(training: Trains, carry: Any, batch: Batch, overs: set[Over]) -> float:
    """Return how far H u is from (∇J(θ + hu) - ∇J(θ)) / h, relative to their size, or 0 if it is not.

    In double precision if the loss can be computed so: h must be so small that no ReLU changes its sign
    on the way. And near the start rather than there, if it is finite near it: a gate that starts at zero
    would hide what is behind it.
    """
    carry = held(carry)
    if len({id(p) for p in carry.params.values()}) < len(carry.params):
        return 0.0  # one tensor for two parameters: they could not be moved apart
    doubled, doubled_batch = tree.map(_double, (carry, batch))
    for given in ((_near(doubled), doubled_batch), (doubled, doubled_batch)):
        try:
            gap = max(_gap_of(training, *given, over) for over in overs)
        except Exception:  # any fault that is not of these changes shows again without them
            continue
        if math.isfinite(gap):
            return gap
    gap = max(_gap_of(training, carry, batch, over) for over in overs)
    return gap if math.isfinite(gap) else 0.0


def _gap_of(training: Trains, carry: Any, batch: Batch, over: Over) -> float:
    params, rng = list(carry.params.values()), Generator().manual_seed(0)
    along = [_noise(p, rng) for p in params]
    grads, dtype = partial(_grads, training, carry, batch), params[0].dtype
    precise = dtype == torch.float64

    def slope(h: Tensor) -> list[Tensor]:
        there = grads([p + h * u for p, u in zip(params, along, strict=True)])
        return [(b - a) / h for a, b in zip(here, there, strict=True)]

    with _Wide(dtype) as wide:
        if over == "reverse":
            here, pull = vjp(grads, params)[:2]
            (turned,) = pull(along)
        else:
            here, turned = jvp(grads, (params,), (along,))[:2]
        h = torch.finfo(dtype).eps ** 0.5 * tree.norm(params).clamp(min=1) / tree.norm(along)
        for _ in range(3):
            found = slope(h)
            k, gap = _largest(found, turned, least=1e-6 if precise else 1e-3)
            if wide.narrowed or gap < (1e-3 if precise else 0.05):
                return 0.0
            h = h / 8
            if not _distance(found[k], slope(h)[k]) > 0.1 * _distance(found[k], turned[k]):
                return gap
    return 0.0  # the slope depends on h, as where a ReLU changes its sign: it tells nothing


class _Wide(TorchFunctionMode):
    """A context in which tensors of a dtype are not cast to a narrower one: rounding would hide a slope.

    `narrowed` tells whether some were all the same, as by autocast.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.narrowed = dtype, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in args if isinstance(x, Tensor) and x.dtype == self.dtype]
        if not given or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if torch.finfo(result.dtype).eps > torch.finfo(self.dtype).eps:
            if func in _CASTS:
                return given[0].clone()
            self.narrowed = self.narrowed or tree.is_tracked(result)
        return result


_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.type_as)


def _largest(x: list[Tensor], y: list[Tensor], least: float) -> tuple[int, float]:
    """Return where two lists differ most, relative to the size of what is there, and by how much."""
    rounding = least * torch.maximum(tree.norm(x), tree.norm(y))
    sizes = [torch.stack([a.norm(), b.norm(), rounding]).amax() for a, b in zip(x, y, strict=True)]
    gaps = torch.stack([_distance(a, b) / size for a, b, size in zip(x, y, sizes, strict=True)])
    return int(gaps.argmax()), float(gaps.amax())


def _distance(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x - y)


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _near(carry: Any) -> Any:
    """Return the carry with parameters a percent away."""
    params, rng = list(carry.params.values()), Generator().manual_seed(1)

    def moved(p: Tensor) -> Tensor:
        size = p.square().mean().sqrt()
        return p + 0.01 * torch.where(size > 0, size, 1.0) * _noise(p, rng)

    return tree.swap(carry, params, [moved(p) for p in params])


def _noise(like: Tensor, rng: Generator) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, generator=rng).to(like.device)
