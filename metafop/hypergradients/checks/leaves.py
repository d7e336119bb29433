"""Leaves of the loss: whether it uses them all, and whether torch's derivative in them is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.func import vjp

from metafop import tree
from metafop.hypergradients.checks.hessian import Wide, double, noise
from metafop.hypergradients.graphs import with_constant_buffers
from metafop.hypergradients.inputs import Inputs, inputs_of
from metafop.hypergradients.locked_jvp import jvp
from metafop.hypergradients.outer_loss import reads_meta, value_of
from metafop.hypergradients.per_training_cache import PerTraining
from metafop.hypergradients.step_vjp import Over, depends_on_value, gradients
from metafop.hypergradients.validation import Skip, batch_at
from metafop.protocols import Batches, Trains
from metafop.types import Batch, Meta, OuterLoss


def look_at_leaves(
    training: Trains,
    over: Over,
    skip: Skip,
    outer_loss: OuterLoss | None,
    meta: Meta,
    carry: Any,
    batches: Batches,
) -> tuple[str, ...]:
    """Refuse a leaf that is not used, and return a note for each whose derivative is hidden.

    Both are looked at at the first step, once for a training; the second unless "hessian" is skipped.
    """
    inputs = inputs_of(meta, with_constant_buffers(carry))
    if not inputs.leaves:
        return ()
    check_leaves_used(training, inputs, outer_loss, batches)
    if "hessian" in skip or not all(map(tree.is_known, inputs.leaves)):
        return ()
    gaps = _gaps(training, (tuple(inputs.names), over), meta, carry, batch_at(batches, 0))
    return tuple(
        f"The loss hides a derivative in its leaf {name}: its gradient changes with it by other than torch's "
        f"derivative, by {gap:.1%} along a random direction, and this hypergradient is wrong in it. Keep the "
        "leaf in tensors: not in float(), item(), or the settings of a function (docs/math.md, 27)."
        for name, gap in gaps.items()
    )


def check_leaves_used(
    training: Trains, inputs: Inputs, outer_loss: OuterLoss | None, batches: Batches
) -> None:
    """Refuse a leaf that neither the gradient of any batch nor the outer loss depends on.

    The first batch tells as a rule, and is asked once for a training.
    """
    names = tuple(inputs.names)
    unused = _unused(training, names, inputs, batch_at(batches, 0))
    for t in range(1, len(batches)):
        if unused:
            unused &= _find(training, names, inputs, batch_at(batches, t))
    if unused and outer_loss is not None and reads_meta(outer_loss):
        unused -= _read_outside(outer_loss, inputs)
    if unused:
        raise ValueError(
            f"The loss does not use the leaves {_listed(sorted(unused))} of meta, of which it is given "
            f"{_listed(names)}: its gradient does not depend on them, or only on numbers that it takes out "
            "of them, by float() or a comparison. Correct the loss, or leave them out of init_meta(loss=...)."
        )


def _find(training: Trains, names: tuple[str, ...], inputs: Inputs, batch: Batch) -> frozenset[str]:
    found, with_value = set(), depends_on_value(training, inputs.meta, inputs.carry)
    for place, (name, leaf) in enumerate(zip(names, inputs.leaves, strict=True), len(inputs.params)):

        def seen(x: Tensor, place: int = place) -> list[Tensor]:
            tensors = [*inputs.tensors[:place], x, *inputs.tensors[place + 1 :]]
            seen = training.evaluate(*inputs.put(tensors), batch)
            return tree.leaves((seen.grads, seen.cotangent, seen.value if with_value else ()))

        if not _depends(seen, leaf):
            found.add(name)
    return frozenset(found)


_unused = PerTraining(_find)


def _read_outside(outer_loss: OuterLoss, inputs: Inputs) -> frozenset[str]:
    """Return the leaves of meta that the outer loss depends on."""

    def value(name: str, x: Tensor) -> Tensor:
        meta: Meta = tree.replace(inputs.meta, {name: x})
        return value_of(outer_loss, meta, inputs.carry)

    leaves = tree.named(inputs.meta.loss, "loss")
    return frozenset(k for k, x in leaves.items() if _depends(lambda x, k=k: value(k, x), x))


def _depends(function: Callable[[Tensor], Tensor | list[Tensor]], x: Tensor) -> bool:
    depends = []

    def recorded(x: Tensor) -> Tensor:
        depends.append(any(map(tree.is_tracked, tree.leaves(function(x)))))
        return x

    vjp(recorded, x)
    return depends[0]


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:5], *([f"… ({len(names)} in all)"] if len(names) > 5 else [])])


def _gaps_of(
    training: Trains, key: tuple[tuple[str, ...], Over], meta: Meta, carry: Any, batch: Batch
) -> dict[str, float]:
    """Return by how much torch's derivative of the gradient in each leaf of the loss is wrong, where it is.

    In double precision if the loss can be computed so: the steps of differences are small.
    """
    names, over = key
    try:
        return _wrong(training, names, over, *tree.map(double, (meta, carry, batch)))
    except Exception:  # any fault that is not of these changes shows again without them
        return _wrong(training, names, over, meta, carry, batch)


_gaps = PerTraining(_gaps_of)


def _wrong(
    training: Trains, names: tuple[str, ...], over: Over, meta: Meta, carry: Any, batch: Batch
) -> dict[str, float]:
    inputs = inputs_of(meta, with_constant_buffers(carry))
    places = range(len(inputs.params), len(inputs.tensors))
    gaps = {
        name: _gap(training, inputs, place, over, batch) for name, place in zip(names, places, strict=True)
    }
    return {name: gap for name, gap in gaps.items() if gap}


def _gap(training: Trains, inputs: Inputs, place: int, over: Over, batch: Batch) -> float:
    """Return ‖(g(φ + h u) - g(φ)) / h - (∂g/∂φ) u‖, relative, for a leaf φ and a random u; 0 if rounding.

    A kink on the way makes the quotient depend on h: then it tells nothing.
    """
    leaf, rng = inputs.tensors[place], Generator().manual_seed(0)
    along, dtype = noise(leaf, rng), leaf.dtype
    eps, tolerance = torch.finfo(dtype).eps, 1e-3 if dtype == torch.float64 else 0.05

    def grads(x: Tensor) -> list[Tensor]:
        return gradients(training, inputs, batch, [*inputs.tensors[:place], x, *inputs.tensors[place + 1 :]])

    with Wide(dtype) as wide:
        here = grads(leaf)
        if over == "reverse":
            pull = vjp(grads, leaf)[1]
            expected = vjp(lambda v: pull(v)[0], here)[1](along)[0]
        else:
            expected = jvp(grads, (leaf,), (along,))[1]
        quotients = []
        for h in (eps**0.5, eps**0.5 / 8):
            h = h * tree.norm(leaf).clamp(min=1) / tree.norm(along)
            found = [(b - a) / h for a, b in zip(here, grads(leaf + h * along), strict=True)]
            error = tree.norm(tree.map(torch.sub, found, expected))
            size = torch.maximum(tree.norm(found), tree.norm(expected))
            if wide.narrowed or not error > tolerance * size + 100 * eps * tree.norm(here) / h:
                return 0.0
            quotients.append(found)
    between = tree.norm(tree.map(torch.sub, *quotients))
    return float((error / size).detach()) if between < 0.1 * error and bool(error.isfinite()) else 0.0
