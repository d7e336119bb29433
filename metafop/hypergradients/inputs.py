"""What a gradient depends on, besides its batch and buffers: parameters, and leaves of the loss."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from metafop import tree
from metafop.types import Meta


@dataclass(frozen=True)
class Inputs:
    """The tensors that a gradient at (meta, carry) is differentiated in, parameters first.

    Then come the leaves of `meta.loss`, and those that an `Online` learns: they lie in its carry. `places`
    are theirs among the floating-point leaves of (meta, carry).
    """

    meta: Meta
    carry: Any
    places: list[int]
    tensors: list[Tensor]

    @property
    def params(self) -> list[Tensor]:
        return self.tensors[: len(self.carry.params)]

    @property
    def leaves(self) -> list[Tensor]:
        return self.tensors[len(self.carry.params) :]

    @property
    def names(self) -> list[str]:
        """The names of the leaves of the loss, such as "loss.l2"."""
        return [name for each in _metas(self.meta, self.carry) for name in tree.named(each.loss, "loss")]

    def put(self, tensors: Sequence[Tensor]) -> tuple[Meta, Any]:
        """Return meta and the carry with these in the first places; the rest are as they were."""
        floats, rebuild = tree.partition((self.meta, self.carry))
        for place, x in zip(self.places, tensors, strict=False):
            floats[place] = x
        return rebuild(floats)


def inputs_of(meta: Meta, carry: Any) -> Inputs:
    floats, rebuild = tree.partition((meta, carry))
    at_meta, at_carry = _numbered(rebuild, len(floats))
    leaves = [place for each in _metas(at_meta, at_carry) for place in tree.leaves(each.loss)]
    places = [*at_carry.params.values(), *leaves]
    return Inputs(meta, carry, places, [floats[place] for place in places])


def _metas(meta: Meta, carry: Any) -> list[Meta]:
    """Return meta, and that in the carry of each learner: not those that its last step started from."""
    below = getattr(carry, "meta", None)
    return [meta, *_metas(below, carry.carry)] if isinstance(below, Meta) else [meta]


def _numbered(rebuild: Callable[[list], Any], count: int) -> Any:
    """Return the tree with the place of each floating-point leaf for it."""
    return rebuild(list(range(count)))
