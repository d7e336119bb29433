"""What is to be known of an unroll besides its derivative: losses, growth, overflow."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.types import Meta, Params


def unroll_info(
    after: Any,
    value: Tensor,
    grads: Meta,
    values: Sequence[Tensor],
    cotangents: Sequence[Tensor] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what is to be known of an unroll that ends in the carry `after`.

    "values", the loss that each step saw; "cotangents", the norms ‖∂value/∂carry_t‖ for t = 0 … T where they
    are known, infinite if their squares are, and "growth", the factor by which they grow in a step back, on
    average; "overflow", the step at which a number that is not finite came up first, or -1; and notes.
    """
    info: dict[str, Any] = {"values": torch.stack(list(values))}
    if cotangents:
        sizes = info["cotangents"] = torch.stack(list(cotangents))
        info["growth"] = (sizes[0] / sizes[-1]) ** (1 / len(values))
    if not tree.is_known(value):
        return info | {"notes": ()}
    step, note = overflow(info["values"], after.params, value, grads, info.get("cotangents"))
    return info | {"overflow": torch.tensor(step), "notes": tuple(each for each in (note, *notes) if each)}


_LARGE = 1e15  # what explodes is larger before it overflows


def overflow(
    values: Tensor, params: Params, value: Tensor, grads: Meta, cotangents: Tensor | None
) -> tuple[int, str]:
    """Return the step at which numbers stopped being finite, forward or back, and a sentence; or -1."""
    steps = len(values)
    not_finite = (~values.isfinite()).nonzero()
    if len(not_finite):
        t = int(not_finite[0])
        return t, f"Training overflowed: the loss of step {t} of {steps} is not finite."
    if not tree.all_finite(params):
        return steps, f"Training overflowed: the parameters after all {steps} steps are not finite."
    if not value.isfinite():
        return steps, f"The outer loss is not finite after all {steps} steps."
    if tree.all_finite(grads):
        return -1, ""
    remedy = "Use a shorter horizon, a smaller lr, or evolution."
    back = [] if cotangents is None else (~cotangents.isfinite()).nonzero()
    if len(back):
        t = int(back[-1])
        if cotangents is not None and cotangents[t].isnan() and cotangents[t + 1] < _LARGE:
            return t, (
                f"Step {t} of {steps} has a derivative that is not a number, though ∂value/∂carry is of size "
                f"{cotangents[t + 1]:.2g} after it: something in the loss or the optimizer has none there, "
                "such as a root at zero. Guard it by torch.where, as Adam does."
            )
        where = f"∂value/∂carry is not finite there. {remedy}"
        return t, f"The hypergradient overflowed at step {t} of {steps}, going back: {where}"
    return 0, f"The hypergradient overflowed as a sum, though no step of {steps} did. {remedy}"
