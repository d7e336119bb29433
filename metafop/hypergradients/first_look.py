"""A first look at a training: how its gradient can be differentiated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.func import vjp

from metafop import tree
from metafop.hypergradients.operations import WrittenOut
from metafop.hypergradients.per_training import PerTraining
from metafop.hypergradients.unroll import Over, forward_fails, gradients, held
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


def first_look(training: Trains, over: Over, carry: Any, batch: Batch) -> Look:
    """Return what is found once for each training, before its first step is differentiated."""
    batched = tree.is_transforming() and not tree.is_differentiating()
    return _looks(training, (over, batched), carry, batch)


def _look(training: Trains, key: tuple[Over, bool], carry: Any, batch: Batch) -> Look:
    (over, batched), notes = key, []
    with WrittenOut() as operations:
        if over == "forward" and (reason := forward_fails(training, carry, batch)):
            over = "reverse"
            notes.append(reason)
        unrecorded = batched and _works_unrecorded(training, held(carry), batch)
        training.evaluate(carry, batch)
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
            vjp(partial(gradients, training, carry, batch), params)[1](params)
    except RuntimeError:
        return False
    return True
