"""How the gradient of a training can be differentiated: found once, before its first step is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.func import vjp

from metafop import stopped_gradients, tree
from metafop.hypergradients.graphs import with_constant_buffers
from metafop.hypergradients.inputs import Inputs, inputs_of
from metafop.hypergradients.locked_jvp import jvp
from metafop.hypergradients.per_training_cache import PerTraining
from metafop.hypergradients.recorded_step import recorded
from metafop.hypergradients.step_vjp import Over, gradients
from metafop.protocols import Trains
from metafop.twice_differentiable import TwiceDifferentiable
from metafop.types import Batch, Meta


class Differentiation(NamedTuple):
    """How to differentiate a gradient.

    `over` is the mode that torch can do, `written_out` says whether operations of torch must be written out
    for it, `recordable` whether torch.autograd alone can record the steps, `unrecorded` whether it is to be
    switched off meanwhile.
    """

    over: Over
    written_out: bool
    recordable: bool
    unrecorded: bool
    notes: tuple[str, ...]

    @contextmanager
    def context(self) -> Iterator[None]:
        """The context in which steps are to be taken."""
        with (
            TwiceDifferentiable(fused=self.recordable) if self.written_out else nullcontext(),
            torch.no_grad() if self.unrecorded else nullcontext(),
        ):
            yield


def differentiation(training: Trains, over: Over, meta: Meta, carry: Any, batch: Batch) -> Differentiation:
    """Return how the gradient of a training is differentiated, `over` the asked mode if torch can do it."""
    inside = tree.is_transforming()
    return _found(training, (over, inside, inside and not tree.is_differentiating()), meta, carry, batch)


def _find(
    training: Trains, key: tuple[Over, bool, bool], meta: Meta, carry: Any, batch: Batch
) -> Differentiation:
    (over, inside, inside_vmap), notes, inputs = key, [], inputs_of(meta, with_constant_buffers(carry))
    with TwiceDifferentiable() as operations:
        if over == "forward" and (reason := _forward_fails(training, inputs, batch)):
            over = "reverse"
            notes.append(reason)
        unrecorded = inside_vmap and _works_unrecorded(training, inputs, batch)
        recordable = over == "reverse" and not inside and _is_recordable(training, meta, carry, batch)
        if not recordable:
            training.evaluate(meta, inputs.carry, batch)
    return Differentiation(over, operations.used, recordable, unrecorded, tuple(notes))


_found = PerTraining(_find)


def _is_recordable(training: Trains, meta: Meta, carry: Any, batch: Batch) -> bool:
    """Return whether torch.autograd alone can record a step, without a transform of torch.func."""
    with stopped_gradients.recording() as record:
        recorded(training, meta, carry, batch)
    return not record.transformed


def _forward_fails(training: Trains, inputs: Inputs, batch: Batch) -> str:
    """Return why the gradient cannot be differentiated forward, or nothing if it can."""
    here = inputs.tensors
    try:
        jvp(partial(gradients, training, inputs, batch), (here,), (tree.zeros_like(here),))
    except (NotImplementedError, RuntimeError) as error:
        # Under autocast, what batch norm pushes forward is of another type than what it returns.
        if "forward" not in str(error) and "same dtype" not in str(error):
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        return f"Differentiated in reverse over reverse, because forward over reverse failed: {reason}."
    return ""


def _works_unrecorded(training: Trains, inputs: Inputs, batch: Batch) -> bool:
    """Return whether the gradient can be pulled back while torch.autograd is switched off.

    Inside vmap it is switched off if it can be: otherwise torch 2.15 cannot pull back through batch norm.
    torch's fused LSTM cannot do without.
    """
    try:
        with torch.no_grad():
            pulling: Any = vjp(partial(gradients, training, inputs, batch), inputs.tensors)
            found, pull = pulling
            pull(found)
    except RuntimeError:
        return False
    return True
