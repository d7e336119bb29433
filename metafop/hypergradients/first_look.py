"""A first look at a training: how its gradient can be differentiated, and whether that is its derivative."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import jvp, vjp

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
    on the way. And on a few examples of the batch if it can: what is looked for lies in the code of the loss.
    """
    carry = held(carry)
    doubled, doubled_batch = tree.map(_double, (carry, batch))
    for given in ((doubled, _few(doubled_batch)), (doubled, doubled_batch)):
        try:
            return max(_gap_of(training, *given, over) for over in overs)
        except Exception:  # any fault that is not of these changes shows again without them
            continue
    return max(_gap_of(training, carry, batch, over) for over in overs)


def _gap_of(training: Trains, carry: Any, batch: Batch, over: Over) -> float:
    params, rng = list(carry.params.values()), Generator().manual_seed(0)
    along = [torch.randn(p.shape, dtype=p.dtype, generator=rng).to(p.device) for p in params]

    grads = partial(_grads, training, carry, batch)

    def slope(h: Tensor) -> list[Tensor]:
        there = grads([p + h * u for p, u in zip(params, along, strict=True)])
        return [(b - a) / h for a, b in zip(here, there, strict=True)]

    turned = vjp(grads, params)[1](along)[0] if over == "reverse" else jvp(grads, (params,), (along,))[1]
    here, dtype = grads(params), params[0].dtype
    h = torch.finfo(dtype).eps ** 0.5 * tree.norm(params).clamp(min=1) / tree.norm(along)
    for _ in range(3):
        found = slope(h)
        k, gap = _largest(found, turned)
        if not gap > _TOLERANCE.get(dtype, 0.05):
            return 0.0
        h = h / 8
        if _distance(found[k], slope(h)[k]) < 0.1 * _distance(found[k], turned[k]):
            return gap
    return 0.0  # the slope depends on h, as where a ReLU changes its sign: it tells nothing


_TOLERANCE = {torch.float64: 1e-3}


def _largest(x: list[Tensor], y: list[Tensor]) -> tuple[int, float]:
    """Return where two lists differ most, relative to the size of what is there, and by how much."""
    least = 1e-3 * torch.maximum(tree.norm(x), tree.norm(y))  # below this, all may be rounding
    sizes = [torch.stack([a.norm(), b.norm(), least]).amax() for a, b in zip(x, y, strict=True)]
    gaps = torch.stack([_distance(a, b) / size for a, b, size in zip(x, y, sizes, strict=True)])
    return int(gaps.argmax()), float(gaps.amax())


def _distance(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x - y)


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _few(batch: Batch) -> Batch:
    """Return an eighth of the examples, 8 at the least, if all tensors have as many."""
    leaves, structure = tree.flatten(batch)
    dense = [isinstance(x, Tensor) and x.dim() > 0 and x.layout == torch.strided for x in leaves]
    counts = {len(x) if d else 0 for d, x in zip(dense, leaves, strict=True)}
    if len(counts) != 1 or 0 in counts:
        return batch
    few = max(counts.pop() // 8, 8)
    return tree.unflatten([x[:few] for x in leaves], structure)
