"""One step ahead and one back, on the leaves of trees: a compiled function takes them faster than trees."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from metafop import tree
from metafop.hypergradients.compiling import Same, compiled
from metafop.hypergradients.unroll import Cotangent, Over, StepBack
from metafop.types import Seen, Trains

Leaves = list[Tensor]


class Kept(NamedTuple):
    """What a step saw, on leaves."""

    value: Tensor
    grads: Leaves
    buffers: Leaves


class Walk(NamedTuple):
    """ahead(meta, carry, batch) -> (carry, kept)

    back(meta, carry, batch, grads, λ, kept) -> (grads, λ, ‖λ‖)
    """

    ahead: Callable[[Leaves, Leaves, Leaves], tuple[Leaves, Kept]]
    back: Callable[[Leaves, Leaves, Leaves, Leaves, Cotangent, Kept | None], tuple[Leaves, Cotangent, Tensor]]


def walk_of(
    training: Trains,
    meta_structure: tree.Structure,
    structure: tree.Structure,
    batch_structure: tree.Structure,
    over: Over,
    looks: bool,
) -> Walk:
    """Return the two functions of a training, for trees of these structures."""
    step_back = StepBack(training, over, looks)

    def ahead(meta_leaves: Leaves, leaves: Leaves, batch: Leaves) -> tuple[Leaves, Kept]:
        carry, meta = tree.unflatten(leaves, structure), tree.unflatten(meta_leaves, meta_structure)
        seen = training.evaluate(carry, tree.unflatten(batch, batch_structure))
        after, _ = training.advance(meta, carry, seen)
        grads, buffers = [seen.grads[k] for k in carry.params], [seen.buffers[k] for k in carry.buffers]
        return tree.leaves(after), Kept(seen.value, grads, buffers)

    def back(
        meta_leaves: Leaves,
        leaves: Leaves,
        batch: Leaves,
        grads: Leaves,
        cotangent: Cotangent,
        kept: Kept | None,
    ) -> tuple[Leaves, Cotangent, Tensor]:
        carry, meta = tree.unflatten(leaves, structure), tree.unflatten(meta_leaves, meta_structure)
        seen = None
        if kept is not None:
            seen_grads = dict(zip(carry.params, kept.grads, strict=True))
            seen = Seen(kept.value, seen_grads, dict(zip(carry.buffers, kept.buffers, strict=True)))
        d_meta, cotangent = step_back(meta, carry, tree.unflatten(batch, batch_structure), cotangent, seen)
        return tree.add(grads, tree.leaves(d_meta)), cotangent, tree.norm(cotangent)

    return Walk(ahead, back)


@lru_cache(maxsize=32)
def compiled_walk(
    training: Same[Trains],
    meta_structure: tree.Structure,
    structure: tree.Structure,
    batch_structure: tree.Structure,
    over: Over,
    looks: bool,
) -> Walk:
    """Return the same compiled; the same functions for the same training, so that each is compiled once."""
    walk = walk_of(training.value, meta_structure, structure, batch_structure, over, looks)
    return Walk(compiled(walk.ahead), compiled(walk.back))
