"""Whether the second derivative that torch takes of a loss is the derivative of its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.func import vjp
from torch.overrides import TorchFunctionMode

from metafop import stopped_gradients, tree
from metafop.hypergradients.graphs import with_constant_buffers
from metafop.hypergradients.inputs import inputs_of
from metafop.hypergradients.locked_jvp import jvp
from metafop.hypergradients.per_training_cache import PerTraining
from metafop.hypergradients.step_vjp import Over, gradients
from metafop.hypergradients.validation import Skip
from metafop.protocols import Trains
from metafop.types import Batch, Meta


@dataclass
class SecondDerivative:
    """What is seen of a loss while its steps are differentiated.

    What it does for the first time is looked at there, once for a training: gradients that it stops, for what
    torch's second derivative leaves out by that; and what hides a derivative, by a difference of gradients.
    """

    training: Trains
    meta: Meta
    over: Over
    skipped: bool
    record: stopped_gradients.Record
    steps: int = 0  # for which there was reason to look
    looks: int = 0
    left_out: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, float] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        """Whether something that the loss does is to be looked at."""
        if self.skipped or not self.record:
            return False
        return bool(self.record.stopped.keys() - self.left_out or self.record.unknown.keys() - self.wrong)

    def is_due(self) -> bool:
        """Return whether to look at a step: at the first, second, fourth, … for which there is reason.

        What does nothing at one step may do something at another.
        """
        self.steps += self.pending
        return self.pending and self.steps.bit_count() == 1

    def look(self, carry: Any, batch: Batch) -> None:
        """Look at a step that was differentiated."""
        self.looks += 1
        for places, find, found in (
            (self.record.stopped.keys() - self.left_out, _left_out, self.left_out),
            (self.record.unknown.keys() - self.wrong, _gaps, self.wrong),
        ):
            key = (frozenset(places), self.looks, self.over)
            if places and (gap := find(self.training, key, self.meta, carry, batch)):
                found |= dict.fromkeys(sorted(places), gap)

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.left_out:
            notes.append(
                f"The loss stops a gradient: {', '.join(self.left_out)}. This is the derivative of the run "
                "as it is computed, through what is stopped. torch.autograd alone would leave that out, "
                f"{max(self.left_out.values()):.1%} of a second derivative (docs/math.md, 27)."
            )
        if self.wrong:
            notes.append(
                f"The loss hides a derivative: {', '.join(self.wrong)}. Its gradient changes by other than "
                f"torch's second derivative, by {max(self.wrong.values()):.1%} along a random direction, and "
                "this hypergradient is wrong by what is hidden. Keep numbers in tensors (detach stops a "
                "gradient), correct the function's derivative, or use evolution (docs/math.md, 27)."
            )
        return tuple(notes)


@contextmanager
def second_derivative(training: Trains, meta: Meta, over: Over, skip: Skip) -> Iterator[SecondDerivative]:
    """A context in which losses are watched while they are differentiated."""
    with stopped_gradients.recording() as record:
        unknown = tree.is_transforming() or not all(map(tree.is_concrete, tree.leaves(meta)))
        yield SecondDerivative(training, meta, over, "hessian" in skip or unknown, record)


Key = tuple[frozenset[str], int, Over]


def _left_out_of(training: Trains, key: Key, meta: Meta, carry: Any, batch: Batch) -> float:
    """Return by how much Jᵀ v changes if torch stops all derivatives, relative to its size, or 0."""
    inputs, rng = inputs_of(meta, with_constant_buffers(carry)), Generator().manual_seed(0)
    grads = partial(gradients, training, inputs, batch)
    noises = [noise(g, rng) for g in grads(inputs.tensors)]
    (whole,) = vjp(grads, inputs.tensors)[1](noises)
    with stopped_gradients.all_derivatives():
        (rest,) = vjp(grads, inputs.tensors)[1](noises)
    rounding = torch.finfo(noises[0].dtype).eps ** 0.5
    sizes = _sizes(whole, rest, rounding)
    gaps = [torch.linalg.vector_norm(a - b) / size for a, b, size in zip(whole, rest, sizes, strict=True)]
    gap = float(torch.stack(gaps).amax().detach())
    return gap if gap > rounding and math.isfinite(gap) else 0.0


_left_out = PerTraining(_left_out_of)


def _gap(training: Trains, key: Key, meta: Meta, carry: Any, batch: Batch) -> float:
    """Return how far J u is from (∇J(θ + hu) - ∇J(θ)) / h, relative to their size, or 0 if it is not.

    In double precision if the loss can be computed so: h must be so small that no ReLU changes its sign
    on the way. And near the parameters rather than there, if it is finite near them: a gate that starts at
    zero would hide what is behind it.
    """
    carry, (*_, over) = with_constant_buffers(carry), key
    if len({id(p) for p in carry.params.values()}) < len(carry.params):
        return 0.0  # one tensor for two parameters: they could not be moved apart
    wide_meta, wide, wide_batch = tree.map(double, (meta, carry, batch))
    for given in ((wide_meta, _near(wide), wide_batch), (wide_meta, wide, wide_batch)):
        try:
            gap = _gap_of(training, *given, over)
        except Exception:  # any fault that is not of these changes shows again without them
            continue
        if math.isfinite(gap):
            return gap
    gap = _gap_of(training, meta, carry, batch, over)
    return gap if math.isfinite(gap) else 0.0


_gaps = PerTraining(_gap)


def _gap_of(training: Trains, meta: Meta, carry: Any, batch: Batch, over: Over) -> float:
    """Return |⟨v, slope⟩ - ⟨v, J u⟩| for random u and v, each tensor of v over its size in these.

    J need not be symmetric: in reverse, ⟨v, J u⟩ = ⟨Jᵀ v, u⟩.
    """
    inputs, rng = inputs_of(meta, carry), Generator().manual_seed(0)
    params, dtype = inputs.params, inputs.params[0].dtype
    along, noises = ([noise(p, rng) for p in params] for _ in range(2))
    least, tolerance = (1e-6, 1e-3) if dtype == torch.float64 else (1e-3, 0.05)

    def grads(params: list[Tensor]) -> list[Tensor]:
        return gradients(training, inputs, batch, params)[: len(params)]

    def slope(h: Tensor) -> list[Tensor]:
        there = grads([p + h * u for p, u in zip(params, along, strict=True)])
        return [(b - a) / h for a, b in zip(here, there, strict=True)]

    with Wide(dtype) as wide:
        here = grads(params)
        h = torch.finfo(dtype).eps ** 0.5 * tree.norm(params).clamp(min=1) / tree.norm(along)
        found = slope(h)
        if over == "reverse":
            pull = vjp(grads, params)[1]
            across = _weighted(noises, found, pull(noises)[0], least)
            expected = _dot(pull(across)[0], along)
        else:
            tangent = jvp(grads, (params,), (along,))[1]
            across = _weighted(noises, found, tangent, least)
            expected = _dot(tangent, across)
        for _ in range(3):
            gap = (_dot(found, across) - expected).abs()
            if wide.narrowed or gap < tolerance:
                return 0.0
            last, h = _dot(found, across), h / 8
            found = slope(h)
            if not (_dot(found, across) - last).abs() > 0.1 * gap:
                return float(gap.detach())
    return 0.0  # the slope depends on h, as where a ReLU changes its sign: it tells nothing


class Wide(TorchFunctionMode):
    """A context in which tensors of a dtype are not cast to a narrower one: rounding would hide a slope.

    `narrowed` tells whether some were all the same, as by autocast.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.narrowed = dtype, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_narrower(kwargs.get("dtype"), self.dtype):
            kwargs = kwargs | {"dtype": self.dtype}
        result = func(*args, **kwargs)
        given = [x for x in args if isinstance(x, Tensor) and x.dtype == self.dtype]
        if not given or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if _is_narrower(result.dtype, self.dtype):
            if func in _CASTS:
                return given[0].clone()
            self.narrowed = self.narrowed or tree.is_tracked(result)
        return result


def _is_narrower(dtype: Any, than: torch.dtype) -> bool:
    return (
        isinstance(dtype, torch.dtype)
        and dtype.is_floating_point
        and torch.finfo(dtype).eps > torch.finfo(than).eps
    )


_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.type_as)


def _sizes(x: list[Tensor], y: list[Tensor], least: float) -> list[Tensor]:
    """Return the norm of each tensor, the larger of two, or a least part of that of all if it is smaller."""
    smallest = (least * tree.norm((x, y))).clamp(min=torch.finfo(x[0].dtype).tiny)
    norms = ((torch.linalg.vector_norm(a), torch.linalg.vector_norm(b)) for a, b in zip(x, y, strict=True))
    return [torch.maximum(*pair).clamp(min=smallest) for pair in norms]


def _weighted(noises: list[Tensor], x: list[Tensor], y: list[Tensor], least: float) -> list[Tensor]:
    return [v / size for v, size in zip(noises, _sizes(x, y, least), strict=True)]


def _dot(x: list[Tensor], y: list[Tensor]) -> Tensor:
    return torch.stack([tree.dot(a, b) for a, b in zip(x, y, strict=True)]).sum()


def double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _near(carry: Any) -> Any:
    """Return the carry with parameters a percent away."""
    rng = Generator().manual_seed(1)

    def moved(p: Tensor) -> Tensor:
        size = p.square().mean().sqrt()
        return p + 0.01 * torch.where(size > 0, size, 1.0) * noise(p, rng)

    return tree.with_params(carry, map(moved, carry.params.values()))


def noise(like: Tensor, rng: Generator) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, generator=rng).to(like.device)
