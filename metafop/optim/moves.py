"""Moves many small tensors by a pure optimizer: equal-sized ones in one update."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from metafop import tree
from metafop.safeguards import over
from metafop.types import Optimizer


class Leaf(NamedTuple):
    """A tensor to be moved: its hypergradient, what to divide that by, the optimizer's state, its age in updates."""

    value: Tensor
    h: Tensor
    size: Tensor | None
    opt: list[Tensor]
    age: int


class Steered(Optimizer, Protocol):
    """An optimizer that can be steered by its lr alone."""

    def hyper(self, lr: float) -> Any: ...


class Mover:
    """An optimizer, for tensors that are not of one tree."""

    def __init__(self, optimizer: Steered) -> None:
        self.optimizer = optimizer
        leaves, self._structure = tree.flatten(optimizer.init({"m": torch.zeros(2)}))
        # States that are one number for a whole tensor, such as Adam's time: equal for tensors of one age.
        self._clocks = [leaf.dim() == 0 for leaf in leaves]
        self.states = len(leaves)
        self._made: tuple[Any, Any] = (None, None)  # the last hyperparameters, for the same again

    def init(self, value: Tensor) -> list[Tensor]:
        return tree.leaves(self.optimizer.init({"m": value}))

    def moved(self, lr: float, leaves: list[Leaf]) -> list[tuple[Tensor, list[Tensor]]]:
        """Return each tensor and its state after one update, or all as they were if one is not finite."""
        hyper = self._hyper(lr, leaves[0].value)
        alike: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            alike.setdefault((leaf.value.shape, leaf.value.dtype, leaf.value.device, leaf.age), []).append(i)
        stacks = [(places, *self._update(hyper, [leaves[i] for i in places])) for places in alike.values()]
        finite = tree.all_finite([(h, new[0]) for _, h, _, new in stacks])
        result: list[Any] = [None] * len(leaves)
        for places, _, old, new in stacks:
            kept = [torch.where(finite, x, y) for x, y in zip(new, old, strict=True)]
            alone = len(places) == 1
            apart = [
                (x,) * len(places) if alone or clock else x.unbind()
                for x, clock in zip(kept, [False, *self._clocks], strict=True)
            ]
            for place, (value, *opt) in zip(places, zip(*apart, strict=True), strict=True):
                result[place] = (value, opt)
        return result

    def _hyper(self, lr: float, like: Tensor) -> Any:
        key = (lr, like.dtype, like.device)
        if self._made[0] != key:
            hyper = self.optimizer.hyper(lr=lr)
            self._made = (key, tree.map(lambda x: x.to(dtype=like.dtype, device=like.device), hyper))
        return self._made[1]

    def _update(self, hyper: Any, leaves: list[Leaf]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the hypergradients, and value and state before and after, of leaves of one shape and age."""
        value, h = _together([leaf.value for leaf in leaves]), _together([leaf.h for leaf in leaves])
        if leaves[0].size is not None:
            size = _together([leaf.size for leaf in leaves if leaf.size is not None])
            h = over(h, size.reshape(-1, *(1,) * leaves[0].value.dim()) if len(leaves) > 1 else size)
        state = [
            xs[0] if clock else _together(list(xs))
            for clock, *xs in zip(self._clocks, *(leaf.opt for leaf in leaves), strict=True)
        ]
        opt = tree.unflatten(state, self._structure)
        new, new_opt = self.optimizer.update(hyper, {"m": value}, opt, {"m": h})
        return h, [value, *state], [new["m"], *tree.leaves(new_opt)]


def _together(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)
