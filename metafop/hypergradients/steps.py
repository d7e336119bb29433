"""The steps of an unroll, forward and back, one at a time: as they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from metafop import tree
from metafop.hypergradients.outer_loss import Cotangent
from metafop.hypergradients.step_vjp import StepVJP
from metafop.hypergradients.validation import batch_at
from metafop.protocols import Batches, Trains
from metafop.types import Meta

Kept = Any  # a carry in the form in which the steps take it
MetaGrads = Any  # ∂value/∂meta so far, in the form in which the steps take it


class Steps(Protocol):
    """The steps from each carry to the next, and their VJPs."""

    @property
    def reuses_gradients(self) -> bool:
        """Whether a step back is faster if it is given what the step saw."""
        ...

    def start(self, carry: Any) -> Kept: ...

    def carry(self, kept: Kept) -> Any: ...

    def start_grads(self, grads: Meta) -> MetaGrads: ...

    def meta_grads(self, grads: MetaGrads) -> Meta: ...

    def forward(self, t: int, kept: Kept) -> tuple[Kept, list[Tensor]]:
        """Return the carry after step t, and what it saw: the loss, each gradient, and what else it keeps."""
        ...

    def backward(
        self, t: int, kept: Kept, grads: MetaGrads, cotangent: Cotangent, seen: list[Tensor]
    ) -> tuple[MetaGrads, Cotangent, Tensor, list[Tensor]]:
        """Return ∂value/∂meta with step t added, λ_t, its norm, and what the step sees when taken again.

        `seen` is what it saw before if that was kept, or empty. What it sees again begins with the loss.
        """
        ...


@dataclass(frozen=True)
class EagerSteps:
    """The steps as they are written, on trees."""

    training: Trains
    meta: Meta
    batches: Batches
    step_vjp: StepVJP
    reuses_gradients: bool = False

    def start(self, carry: Any) -> Any:
        return carry

    def carry(self, kept: Any) -> Any:
        return kept

    def start_grads(self, grads: Meta) -> Meta:
        return grads

    def meta_grads(self, grads: Meta) -> Meta:
        return grads

    def forward(self, t: int, kept: Any) -> tuple[Any, list[Tensor]]:
        seen = self.training.evaluate(self.meta, kept, batch_at(self.batches, t))
        after, _ = self.training.advance(self.meta, kept, seen)
        return after, [seen.value, *(seen.grads[k] for k in kept.params)]

    def backward(
        self, t: int, kept: Any, grads: Meta, cotangent: Cotangent, seen: list[Tensor]
    ) -> tuple[Meta, Cotangent, Tensor, list[Tensor]]:
        batch = batch_at(self.batches, t)
        d_meta, cotangent, again = self.step_vjp(self.meta, kept, batch, cotangent)
        observed = [again.value, *(again.grads[k] for k in kept.params)]
        return tree.add(grads, d_meta), cotangent, tree.norm(cotangent), observed
