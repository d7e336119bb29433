"""One step of training as torch.autograd records it, and its vector-Jacobian product."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.hypergradients.graphs import detached, with_constant_buffers
from metafop.hypergradients.outer_loss import Cotangent
from metafop.hypergradients.per_training_cache import PerTraining
from metafop.protocols import Trains
from metafop.types import Batch, Meta, Seen


class RecordedStep(NamedTuple):
    """The graph of one step: from the leaves of meta and of a carry to those of the carry after it.

    inputs: the floating-point leaves of (meta, carry), as the graph has them.
    outputs: those of the carry after the step.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]

    def pull(self, cotangent: Cotangent) -> list[Tensor | None]:
        """Return the derivatives of ⟨cotangent, outputs⟩ in the inputs, None where there is none.

        This sets the graph free: it can be asked once.
        """
        moving = [(x, c) for x, c in zip(self.outputs, cotangent, strict=True) if x.requires_grad]
        if not moving:
            return [None for _ in self.inputs]
        outputs, cotangents = map(list, zip(*moving, strict=True))
        return list(torch.autograd.grad(outputs, self.inputs, cotangents, allow_unused=True))


def recorded(training: Trains, meta: Meta, carry: Any, batch: Batch) -> tuple[Any, Seen, RecordedStep]:
    """Return the carry after a step, what it saw, and its graph, of which neither of these is a part."""
    floats, rebuild = tree.partition((meta, carry))
    inputs = [x.detach().requires_grad_() for x in floats]
    own_meta, own_carry = rebuild(inputs)
    constant = with_constant_buffers(own_carry)
    seen = training.evaluate(own_meta, constant, batch)
    after, _ = training.advance(own_meta, constant, seen)
    step = RecordedStep(inputs, tree.partition(after)[0])
    return *detached((after, seen)), step


@dataclass(frozen=True)
class RecordedVJP:
    """The derivatives of ⟨cotangent, carry after the step⟩ in meta and in the carry before the step."""

    training: Trains

    def __call__(
        self, meta: Meta, carry: Any, batch: Batch, cotangent: Cotangent
    ) -> tuple[Meta, Cotangent, Seen]:
        _, seen, step = recorded(self.training, meta, carry, batch)
        found = [
            torch.zeros_like(x) if d is None else d
            for x, d in zip(step.inputs, step.pull(cotangent), strict=True)
        ]
        leaves, structure = tree.flatten(meta)
        return tree.unflatten(found[: len(leaves)], structure), found[len(leaves) :], seen


def _bytes_recorded(training: Trains, _: Any, meta: Meta, carry: Any, batch: Batch) -> int:
    """Return the bytes that wait for a step back: the carry before the step, and what its graph has saved."""
    _, _, step = recorded(training, meta, carry, batch)
    others = _storages((step.inputs, step.outputs, batch))
    saved = _storages(_saved(step.outputs)).items()
    return tree.size(carry) + sum(size for place, size in saved if place not in others)


bytes_recorded = PerTraining(_bytes_recorded)  # for batches of some shapes


def _storages(x: Any) -> dict[torch.UntypedStorage, int]:
    """Return the bytes of each storage of these tensors, by storage."""
    tensors = [leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    return {s: s.nbytes() for s in (leaf.untyped_storage() for leaf in tensors)}


def _saved(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that the graph of these has saved for its derivative."""
    waiting: list[Any] = [x.grad_fn for x in outputs]
    known, saved = {None}, []
    while waiting:
        node = waiting.pop()
        if node in known:
            continue
        known.add(node)
        found = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved += [tree.unwrapped(x) for x in tree.leaves(found) if isinstance(x, Tensor)]
        waiting += [each for each, _ in node.next_functions]
    return saved
