"""One step ahead and one back, on the leaves of trees: a compiled function takes them faster than trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from metafop import tree
from metafop.hypergradients.compiling import Compiled, Leaves
from metafop.hypergradients.per_training import PerTraining
from metafop.hypergradients.unroll import Over, StepBack
from metafop.types import Seen, Trains


class Walk(NamedTuple):
    """ahead(meta, carry, batch) -> (carry, kept)        kept is what was seen: [value, *grads, *buffers]

    back(meta, carry, batch, grads, λ, kept) -> (grads, λ, [‖λ‖], again)        [] if it was not kept

    again is what is seen when the step is taken again: [value], and [value, *grads] if it was not kept
    """

    ahead: Callable[[Leaves, Leaves, Leaves], tuple[Leaves, ...]]
    back: Callable[[Leaves, Leaves, Leaves, Leaves, Leaves, Leaves], tuple[Leaves, ...]]


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

    def trees(meta: Leaves, carry: Leaves, batch: Leaves) -> tuple[Any, Any, Any]:
        structures = (meta_structure, structure, batch_structure)
        return tuple(map(tree.unflatten, (meta, carry, batch), structures))

    def ahead(*leaves: Leaves) -> tuple[Leaves, ...]:
        meta, carry, batch = trees(*leaves)
        seen = training.evaluate(carry, batch)
        after, _ = training.advance(meta, carry, seen)
        grads, buffers = [seen.grads[k] for k in carry.params], [seen.buffers[k] for k in carry.buffers]
        return tree.leaves(after), [seen.value, *grads, *buffers]

    def back(
        meta_leaves: Leaves, leaves: Leaves, batch: Leaves, grads: Leaves, cotangent: Leaves, kept: Leaves
    ) -> tuple[Leaves, ...]:
        meta, carry, batch = trees(meta_leaves, leaves, batch)
        seen = None
        if kept:
            value, *others = kept
            grads_of = dict(zip(carry.params, others, strict=False))
            buffers = dict(zip(carry.buffers, others[len(grads_of) :], strict=True))
            seen = Seen(value, grads_of, buffers)
        d_meta, cotangent, seen_again = step_back(meta, carry, batch, cotangent, seen)
        again = [seen_again.value] if kept else [seen_again.value, *map(seen_again.grads.get, carry.params)]
        return tree.add(grads, tree.leaves(d_meta)), cotangent, [tree.norm(cotangent)], again

    return Walk(ahead, back)


def _compiled(training: Trains, key: tuple) -> Walk:
    *settings, checked = key
    walk = walk_of(training, *settings)
    return Walk(Compiled(walk.ahead, checked), Compiled(walk.back, checked))


# compiled_walk(training, (*settings of walk_of, checked)): the same functions each time, compiled once.
compiled_walk = PerTraining(_compiled)
