"""The steps of an unroll, forward and back, one at a time: as they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from metafop import tree
from metafop.hypergradients.outer_loss import Cotangent
from metafop.hypergradients.recorded_step import RecordedStep, bytes_recorded, recorded
from metafop.hypergradients.step_vjp import StepVJP
from metafop.hypergradients.validation import batch_at
from metafop.protocols import Batches, Trains
from metafop.types import Meta, Seen

Kept = Any  # a carry in the form in which the steps take it
Record = Any  # what a step back needs besides the carry and the batch
MetaGrads = Any  # ∂value/∂meta so far, in the form in which the steps take it


class Steps(Protocol):
    """The steps from each carry to the next, and their VJPs."""

    @property
    def bytes_recorded(self) -> int:
        """How many bytes wait for a step back that is recorded, its carry among them."""
        ...

    @property
    def evaluates_again(self) -> bool:
        """Whether a step back takes the step again, and needs no record."""
        ...

    def start(self, carry: Any) -> Kept: ...

    def carry(self, kept: Kept) -> Any: ...

    def start_grads(self, grads: Meta) -> MetaGrads: ...

    def meta_grads(self, grads: MetaGrads) -> Meta: ...

    def forward(self, t: int, kept: Kept) -> tuple[Kept, list[Tensor], Record]:
        """Return the carry after step t, what it saw (the loss, gradients), and what its step back needs."""
        ...

    def backward(
        self, t: int, kept: Kept, record: Record, grads: MetaGrads, cotangent: Cotangent
    ) -> tuple[MetaGrads, Cotangent, Tensor, list[Tensor]]:
        """Return ∂value/∂meta with step t added, λ_t, its norm, and what the step sees if it is taken again.

        What it sees again begins with the loss; it is empty if the step is not taken again.
        """
        ...


@dataclass(frozen=True)
class RecordedSteps:
    """The steps as torch.autograd records them, each with a graph of its own."""

    training: Trains
    meta: Meta
    batches: Batches
    bytes_recorded: int
    evaluates_again: bool = False

    @staticmethod
    def of(training: Trains, meta: Meta, carry: Any, batches: Batches) -> RecordedSteps:
        first = batch_at(batches, 0)
        shapes = tuple(x.shape if isinstance(x, Tensor) else None for x in tree.leaves(first))
        return RecordedSteps(training, meta, batches, bytes_recorded(training, shapes, meta, carry, first))

    def start(self, carry: Any) -> Any:
        return carry

    def carry(self, kept: Any) -> Any:
        return kept

    def start_grads(self, grads: Meta) -> list[Tensor]:
        return tree.leaves(grads)

    def meta_grads(self, grads: list[Tensor]) -> Meta:
        return tree.unflatten(grads, tree.flatten(self.meta)[1])

    def forward(self, t: int, kept: Any) -> tuple[Any, list[Tensor], RecordedStep]:
        after, seen, step = recorded(self.training, self.meta, kept, batch_at(self.batches, t))
        return after, _listed(seen), step

    def backward(
        self, t: int, kept: Any, record: RecordedStep, grads: list[Tensor], cotangent: Cotangent
    ) -> tuple[list[Tensor], Cotangent, Tensor, list[Tensor]]:
        pulled, count = record.pull(cotangent), len(grads)
        grads = [x if d is None else x + d for x, d in zip(grads, pulled[:count], strict=True)]
        cotangent = [
            torch.zeros_like(x) if d is None else d
            for x, d in zip(record.inputs[count:], pulled[count:], strict=True)
        ]
        return grads, cotangent, tree.norm(cotangent), []


@dataclass(frozen=True)
class TransformedSteps:
    """The steps as transforms of torch.func take them: inside one, and where gradients are pushed forward."""

    training: Trains
    meta: Meta
    batches: Batches
    step_vjp: StepVJP
    bytes_recorded: int
    evaluates_again: bool = True

    def start(self, carry: Any) -> Any:
        return carry

    def carry(self, kept: Any) -> Any:
        return kept

    def start_grads(self, grads: Meta) -> Meta:
        return grads

    def meta_grads(self, grads: Meta) -> Meta:
        return grads

    def forward(self, t: int, kept: Any) -> tuple[Any, list[Tensor], tuple[()]]:
        seen = self.training.evaluate(self.meta, kept, batch_at(self.batches, t))
        after, _ = self.training.advance(self.meta, kept, seen)
        return after, _listed(seen), ()

    def backward(
        self, t: int, kept: Any, record: tuple[()], grads: Meta, cotangent: Cotangent
    ) -> tuple[Meta, Cotangent, Tensor, list[Tensor]]:
        batch = batch_at(self.batches, t)
        d_meta, cotangent, again = self.step_vjp(self.meta, kept, batch, cotangent)
        return tree.add(grads, d_meta), cotangent, tree.norm(cotangent), _listed(again)


def _listed(seen: Seen) -> list[Tensor]:
    return [seen.value, *seen.grads.values()]
