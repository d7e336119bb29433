"""The loss by whose gradient an `Online` learns, if that is another than the loss of training."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from metafop import validation as checks
from metafop.functional import takes_leaves
from metafop.optimizers import SGD
from metafop.training import Training
from metafop.types import Batch, Carry, Loss, Meta, Params


@dataclass(frozen=True)
class ValidationLoss:
    """A loss of a batch of its own: each step is given a pair (batch, batch of the validation loss)."""

    loss: Loss

    def __post_init__(self) -> None:
        checks.loss("Online(validation=...)", self.loss)
        if takes_leaves(self.loss, 3):
            raise TypeError(
                "The validation loss of Online takes (params, buffers, batch), got one that takes leaves of "
                "meta too: its own derivative in these would be left out. Use an estimator of many steps."
            )

    def gradient(self, carry: Any, batch: Batch) -> Params:
        """Return the gradient of the loss of a `batch` at the parameters of a `carry`."""
        here = Carry(carry.params, (), carry.buffers)
        return Training(self.loss, SGD()).evaluate(Meta((), {}), here, batch).grads


def split(validation: ValidationLoss | None, batch: Batch) -> tuple[Batch, Batch]:
    """Return what the loss of training is given of a batch, and what the validation loss is given."""
    if validation is None:
        return batch, None
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            "Online with a validation loss takes pairs (batch, batch of the validation loss), got a "
            f"{type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, Sized) else ''}. Pass both."
        )
    own, held_out = batch
    return own, held_out
