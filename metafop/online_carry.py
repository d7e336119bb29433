"""What an online step hands on, and what it is where a step is not taken."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.types import Buffers, Carry, Given, Meta, Params, Seen, Tree


class OnlineCarry(NamedTuple):
    """What an online step hands on: the carry of the training below, its meta, and the last step.

    carry, meta: those of the training below, after the last step.
    meta_opt: the meta-optimizer's state.
    last_carry, last_seen: where the last step started, and what it saw there.
    memory: that of credit, before the last step.
    taken: 1 if there is a last step to learn from; 0 before the first, and after one that saw what is not
        finite; -1 after one that led to that and was not taken, so that `memory` is that before the next.
    given: what the loss of the last step was given, where a leaf of it is learned; `()` where none is.
    """

    carry: Any
    meta: Meta
    meta_opt: Tree
    last_carry: Any
    last_seen: Seen
    memory: Tree
    taken: Tensor
    given: Given | tuple[()] = ()

    @property
    def params(self) -> Params:
        return self.carry.params

    @property
    def buffers(self) -> Buffers:
        return self.carry.buffers


def nothing_seen(carry: Any, validated: bool) -> Seen:
    """Return what was seen before the first step, zeros in the form of what every step sees.

    carry: that of the training below, a learner or not.
    validated: whether a step sees the gradient of a validation loss of its own.
    """
    zeros = tree.zeros_like(carry.params)
    param = next(iter(carry.params.values()))
    value = param.new_zeros((), dtype=torch.promote_types(param.dtype, torch.float32))
    if not isinstance(carry, OnlineCarry):
        return Seen(value, zeros, carry.buffers, zeros if validated else ())
    below = carry.last_seen
    batch = carry.given.batch if carry.given else below.batch
    return Seen(value, zeros, carry.buffers, tree.zeros_like(below.cotangent), batch)


def zero_gradient_unless(finite: Tensor, seen: Seen, buffers: Buffers) -> Seen:
    """Return what was seen or, if it is not finite, no gradient and the old buffers, valued NaN.

    Integer buffers, such as a count or the seed of the next step, go on. (docs/math.md, 16)
    """
    if tree.is_surely(finite):  # all that is left out then is work
        return seen
    return Seen(
        torch.where(finite, seen.value, torch.nan),
        {k: torch.where(finite, g, 0.0) for k, g in seen.grads.items()},
        {k: torch.where(finite, b, buffers[k]) if tree.is_inexact(b) else b for k, b in seen.buffers.items()},
        tree.map(lambda g: torch.where(finite, g, 0.0), seen.cotangent),
        seen.batch,
    )


def moving(carry: Any) -> Tree:
    """Return what a step has computed: buffers and what was seen are looked at before it."""
    return (carry.params, carry.opt) if isinstance(carry, Carry) else carry.params


def staying(state: OnlineCarry, new: OnlineCarry, memory: Tree) -> OnlineCarry:
    """Return the state if a step led to the `new` one, which is not finite, and was not taken.

    Integer buffers go on. Nothing is learned from the step: so where it started and what it saw may stay in
    the state, and compiled code has less to select from.

    memory: that of credit, before the step.
    """
    seen = new.last_seen.buffers
    buffers = {k: b if tree.is_inexact(b) else seen[k] for k, b in state.buffers.items()}
    carry, taken = state.carry._replace(buffers=buffers), -torch.ones_like(state.taken)
    return new._replace(carry=carry, meta=state.meta, meta_opt=state.meta_opt, memory=memory, taken=taken)
