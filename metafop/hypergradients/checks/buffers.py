"""Buffers are not differentiated: whether a derivative is missed by that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from metafop import tree
from metafop.hypergradients.graphs import has_buffers
from metafop.hypergradients.per_training_cache import PerTraining
from metafop.hypergradients.validation import Skip
from metafop.protocols import Trains
from metafop.types import Batch, Meta, OuterLoss, Seen


class MissedBuffers:
    """Whether a gradient or the outer loss depends on buffers that training has changed.

    To see it, those that have changed since the start are moved at random: at the last step and at the end,
    and at an early step once for a training.
    Before step 2 nothing can be missed: the first parameters, and so the next buffers, do not depend on meta.
    They do where derivatives go on from an earlier window (`continued`): there, those are moved that the last
    step changes.
    """

    def __init__(
        self, training: Trains, meta: Meta, start: Any, steps: int, skip: Skip, continued: bool = False
    ) -> None:
        self.training, self.meta, self.start, self.continued = training, meta, start, continued
        checked = "buffers" not in skip and (steps > 1 or continued)
        self.outer = checked and any(tree.is_inexact(b) and tree.is_known(b) for b in start.buffers.values())
        steps_seen = {steps - 1} if continued else {t for t in (2, steps - 1) if t > 1}
        self.steps = steps_seen if self.outer else set()
        self.names: frozenset[str] = frozenset()

    def at(
        self,
        t: int,
        carry: Any,
        batch: Batch,
        seen: Seen,
        after: Any = None,
        evaluate: Callable[[Any], Seen] | None = None,
    ) -> None:
        """Look at a step that saw a loss and gradients, as `evaluate` computes them."""
        if t not in self.steps or self.names:
            return
        moved, names = _moved(carry, after if self.continued else self.start)
        if names and t < max(self.steps):
            self.names = _early(
                self.training, frozenset(names), self.meta, carry, moved, batch, seen, evaluate
            )
        elif names:
            self.names = _read(
                self.training, frozenset(names), self.meta, carry, moved, batch, seen, evaluate
            )

    def note(self, outer_loss: OuterLoss, after: Any, value: Tensor) -> str:
        """Say what is missed, if anything is; `value` is the outer loss of the carry `after`."""
        if self.outer:
            moved, names = _moved(after, self.start)
            rounding = 100 * torch.finfo(value.dtype).eps  # it was computed inside a transform
            near = partial(torch.isclose, value, rtol=rounding, atol=0, equal_nan=True)
            if names and not near(outer_loss(moved)) and near(outer_loss(after)):  # unless it draws numbers
                return (
                    f"The outer loss depends on the buffers ({', '.join(sorted(names))}), as a loss in eval "
                    "mode does on batch norm's statistics, and the derivative through them is missed. In "
                    "training mode nothing is."
                )
        if self.names:
            return (
                f"The gradient depends on the buffers ({', '.join(sorted(self.names))}), and the derivative "
                "through them is missed. Make them parameters, or part of the optimizer's state."
            )
        return ""


def _read(
    training: Trains,
    names: frozenset[str],
    meta: Meta,
    carry: Any,
    moved: Any,
    batch: Batch,
    seen: Seen,
    evaluate: Callable[[Any], Seen] | None,
) -> frozenset[str]:
    """Return the names of the moved buffers if the gradient depends on them, or none."""
    there = evaluate(moved) if evaluate else training.evaluate(meta, moved, batch)
    if all(torch.equal(seen.grads[k], there.grads[k]) for k in seen.grads):
        return frozenset()
    here, there = (training.evaluate(meta, each, batch).grads for each in (carry, moved))
    return frozenset() if all(torch.equal(here[k], there[k]) for k in here) else names


_early = PerTraining(_read)  # the early one of the two steps, once for a training


def _moved(carry: Any, start: Any) -> tuple[Any, set[str]]:
    """Return the carry with other numbers in the buffers that are not those of the start, and their names."""
    rng, names = Generator().manual_seed(0), set()

    def move(x: Any, before: Any) -> Any:
        if not has_buffers(x):
            return x
        changed = {
            k: b + 0.1 * (1 + b.abs()) * torch.randn(b.shape, dtype=b.dtype, generator=rng).to(b.device)
            for k, b in x.buffers.items()
            if tree.is_inexact(b) and not torch.equal(b, before.buffers[k])
        }
        names.update(changed)
        return x._replace(buffers=x.buffers | changed)

    return tree.map(move, carry, start, is_leaf=has_buffers), names
