"""What is to be known of an unroll besides its derivative: losses, growth, overflow, and what is missed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.hypergradients.unroll import batch_at, has_buffers
from metafop.types import Batches, Meta, OuterLoss, Trains


def findings(
    training: Trains,
    outer_loss: OuterLoss,
    batches: Batches,
    start: Any,
    after: Any,
    value: Tensor,
    grads: Meta,
    values: Sequence[Tensor],
    cotangents: Sequence[Tensor] = (),
) -> dict[str, Any]:
    """Return what is to be known of an unroll from `start` to `after`.

    "values", the loss that each step saw; "cotangents", the norms ‖∂value/∂carry_t‖ for t = 0 … T where they
    are known, infinite if their squares are; "overflow", the step at which a number that is not finite came
    up first, or -1; and notes.
    """
    info: dict[str, Any] = {"values": torch.stack(list(values))}
    if cotangents:
        info["cotangents"] = torch.stack(list(cotangents))
    if tree.is_transforming():  # where no value may be looked at
        return info | {"notes": ()}
    step, note = overflow(info["values"], value, grads, info.get("cotangents"))
    notes = (note, _missed(training, outer_loss, batch_at(batches, 0), start, after))
    return info | {"overflow": torch.tensor(step), "notes": tuple(note for note in notes if note)}


def overflow(values: Tensor, value: Tensor, grads: Meta, cotangents: Tensor | None) -> tuple[int, str]:
    """Return the step at which numbers stopped being finite, going ahead or back, and a sentence; or -1."""
    steps = len(values)
    ahead = (~values.isfinite()).nonzero()
    if len(ahead):
        t = int(ahead[0])
        return t, f"Training overflowed: the loss of step {t} of {steps} is not finite."
    if not value.isfinite():
        return steps, f"The outer loss is not finite after all {steps} steps."
    if tree.all_finite(grads):
        return -1, ""
    remedy = "Use a shorter horizon, a smaller lr, or evolution."
    back = [] if cotangents is None else (~cotangents.isfinite()).nonzero()
    if len(back):
        t = int(back[-1])
        where = f"∂value/∂carry is not finite there. {remedy}"
        return t, f"The hypergradient overflowed at step {t} of {steps}, going back: {where}"
    return 0, f"The hypergradient overflowed as a sum, though no step of {steps} did. {remedy}"


def _missed(training: Trains, outer_loss: OuterLoss, batch: Any, start: Any, after: Any) -> str:
    """Say so if a loss depends on buffers: how these depend on meta is not differentiated."""
    if not after.buffers:
        return ""
    names = ", ".join(sorted(after.buffers))
    if not torch.equal(outer_loss(after), outer_loss(_moved(after))):
        return (
            f"The outer loss depends on the buffers ({names}), as a loss in eval mode does on batch norm's "
            "statistics, and the derivative through them is missed. In training mode nothing is."
        )
    grads, moved = (training.evaluate(carry, batch).grads for carry in (start, _moved(start)))
    if not all(torch.equal(g, moved[name]) for name, g in grads.items()):
        return (
            f"The gradient depends on the buffers ({names}), and the derivative through them is missed. "
            "Make them parameters, or part of the optimizer's state."
        )
    return ""


def _moved(carry: Any) -> Any:
    """Return the carry with other buffers."""

    def move(x: Any) -> Any:
        return x._replace(buffers=tree.map(lambda b: b + 1, x.buffers)) if has_buffers(x) else x

    return tree.map(move, carry, is_leaf=has_buffers)
