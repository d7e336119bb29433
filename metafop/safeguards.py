"""What keeps learning safe: guards on hypergradients before they are used, bounds on meta after.

A guard is `(grads, now, last, seen) -> grads`: the hypergradient in the learner's coordinates, the parameters
now, the last step, and what was seen since. A bound is `meta -> meta`.
"""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from metafop import patterns, tree
from metafop.preconditioners import Aging
from metafop.types import Last, Meta, Params, Seen, Tree

Guard = Callable[[Meta, Params, Last, Seen], Meta]
Bound = Callable[[Meta], Meta]


def scale_free(grads: Meta, now: Params, last: Last, seen: Seen) -> Meta:
    """Divide the hypergradient by ‖∇J‖ ‖Δθ‖, the most that a step so long can change J by (docs/math.md, 14).

    grads: the hypergradient, in the learner's coordinates.
    now: the parameters now; Δθ leads there from those that the last step started from.
    last: the last step.
    seen: what was seen after it; ∇J is its gradient.

    To first order, that is. What belongs to one parameter, or to a pattern of them, is divided by their own
    norms, the rest by those of all parameters together. What is left has no units: for log lr under SGD, ⟨∇J,
    Δθ⟩ over it is a cosine.
    """
    slopes = torch.stack([_size(seen.grads[k]) for k in now])
    lengths = torch.stack([_size(p - last.carry.params[k]) for k, p in now.items()])
    by_name = dict(zip(now, largest_change(slopes, lengths).unbind(), strict=True))
    everywhere = largest_change(_size(slopes), _size(lengths))

    def of(pattern: str, keys: tuple[str, ...]) -> Tensor:
        """Return the size of the parameters of a pattern; of all, for the names of an outer meta."""
        if pattern in by_name:
            return by_name[pattern]
        fitting = [i for i, k in enumerate(now) if patterns.first(keys, k) == pattern]
        return largest_change(_size(slopes[fitting]), _size(lengths[fitting])) if fitting else everywhere

    def free(h: Tensor | tuple | dict[str, Tensor]) -> Any:
        if isinstance(h, dict):
            return {k: _divided(x, of(k, tuple(h))) for k, x in h.items()}
        return tuple(map(free, h)) if isinstance(h, tuple) else _divided(h, everywhere)

    return Meta(
        type(grads.hyper)(*(free(h) for h in grads.hyper)),
        {k: tree.map_named(lambda _, x, k=k: _divided(x, by_name[k]), h) for k, h in grads.precond.items()},
        tree.map(lambda x: _divided(x, everywhere), grads.loss),
    )


Size = TypeVar("Size", float, Tensor)


def largest_change(gradient: Size, displacement: Size) -> Size:
    """Return ‖∇J‖ ‖Δθ‖: the divisor of a scale-free hypergradient (docs/math.md, 14).

    gradient, displacement: the two norms, both numbers or both tensors.

    It is infinite where there is no gradient or no step: what is divided by it is zero then.
    """
    size = gradient * displacement
    if isinstance(size, Tensor):
        return _or_infinity(size)
    return size if size > 0 else math.inf


def feedback(grads: Meta, now: Params, last: Last, seen: Seen) -> Meta:
    """Divide the hypergradient by ‖∇J‖² at the last step: OSGM's normalised feedback (Gao et al., 2024).

    Its gradient is that of (J(θ') - J(θ)) / ‖∇J(θ)‖². (docs/math.md, 15)

    grads: the hypergradient, in the learner's coordinates.
    last: the last step; ∇J(θ) is the gradient that it saw.
    now, seen: not used here, but every guard is given them.
    """
    size = tree.norm(last.seen.grads).square()
    return tree.map(lambda x: _divided(x, _or_infinity(size)), grads)


def clip(limit: float) -> Guard:
    """Return a guard that shortens the hypergradient to a norm of at most `limit` (docs/math.md, 18)."""
    _check_limit("clip", limit)

    def clipped(grads: Meta, now: Params, last: Last, seen: Seen) -> Meta:
        size = tree.norm(grads)
        return tree.scale(grads, (limit / size.clamp(min=torch.finfo(size.dtype).tiny)).clamp(max=1))

    return clipped


def bound_norm(limit: float) -> Bound:
    """Return a bound that keeps ‖M‖_F of every preconditioner's tensors within `limit` (docs/math.md, 18).

    It bounds ‖P‖ too: M Mᵀ by limit², I + M Mᵀ by 1 + limit². For a bound on ‖P‖ itself, wrap the family in
    `Bounded`.
    """
    _check_limit("bound_norm", limit)

    def shrink(x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x)
        return x * (limit / size.clamp(min=torch.finfo(size.dtype).tiny)).clamp(max=1)

    def bounded(meta: Meta) -> Meta:
        return meta._replace(precond={k: _inner_map(shrink, m) for k, m in meta.precond.items()})

    return bounded


def _inner_map(function: Callable[[Tensor], Tensor], m: Tree) -> Tree:
    """Return the tensors of a family with `function` applied to all but its times."""
    return Aging(_inner_map(function, m.inner), m.time) if isinstance(m, Aging) else tree.map(function, m)


def _or_infinity(size: Tensor) -> Tensor:
    """Return a size to divide by, infinite where it is zero."""
    return torch.where(size > 0, size, torch.inf)


def _divided(x: Tensor, size: Tensor) -> Tensor:
    return (x / size).to(x.dtype)


def _size(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x)


def _check_limit(name: str, limit: float) -> None:
    # At infinity the scale would have the derivative 0 · ∞.
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise ValueError(
            f"safeguards.{name} takes a finite limit above zero, got {limit!r}. Pass a positive number."
        )
