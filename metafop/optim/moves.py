"""Moves many small tensors by a pure optimizer, in one update for all that are of one age."""

from typing import Any, Protocol

import torch
from torch import Tensor

from metafop import tree
from metafop.types import Optimizer


class Steered(Optimizer, Protocol):
    """An optimizer that can be steered by its lr alone."""

    def hyper(self, lr: float) -> Any: ...


class Leaf:
    """A tensor that is learned, the optimizer's states for it, and how many updates it has had.

    The tensors are changed in place. They are held as vectors, for all of them are moved as one.
    """

    def __init__(self, value: Tensor, opt: list[Tensor], age: int) -> None:
        self.value, self.opt, self.age = value, opt, age
        self.flat = value.view(-1)
        self.flat_opt = [x.view(-1) for x in opt]


class Mover:
    """A pure optimizer, for tensors that are learned side by side."""

    def __init__(self, optimizer: Steered) -> None:
        self.optimizer = optimizer
        states, self._structure = tree.flatten(optimizer.init({"m": torch.zeros(2)}))
        # States that are one number for a whole tensor, such as Adam's time: equal for all of one age.
        self._clocks = [state.dim() == 0 for state in states]
        self.states = len(states)
        self._made: tuple[Any, Any] = (None, None)

    def init(self, value: Tensor) -> list[Tensor]:
        return tree.leaves(self.optimizer.init({"m": value}))

    def move(
        self, lr: float, leaves: list[Leaf], grads: list[Tensor]
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Move each tensor along its hypergradient; none, if what comes of it is not finite.

        Return what was written over, and where, to be put back if need be.
        """
        alike: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            alike.setdefault((leaf.value.dtype, leaf.value.device, leaf.age), []).append(i)
        moves = [self._moved(lr, [leaves[i] for i in of], [grads[i] for i in of]) for of in alike.values()]
        finite = tree.all_finite([new[0] for _, _, new in moves])
        undo = []
        for of, (old, places, new) in zip(alike.values(), moves, strict=True):
            sizes = [leaves[i].flat.numel() for i in of]
            for before, where, after, clock in zip(old, places, new, [False, *self._clocks], strict=True):
                kept = after if clock else torch.where(finite, after, before)  # a clock goes on, as ages do
                pieces = [kept.view(1)] * len(of) if clock else list(kept.split(sizes))
                torch._foreach_copy_(where, pieces)
                undo.append((where, [before.view(1)] * len(of) if clock else list(before.split(sizes))))
            for i in of:
                leaves[i].age += 1
        return undo

    def _moved(
        self, lr: float, leaves: list[Leaf], grads: list[Tensor]
    ) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        """Return value and states of leaves of one age, as vectors: before, where they lie, and after."""
        places = [[leaf.flat for leaf in leaves]]
        places += [[leaf.flat_opt[j] for leaf in leaves] for j in range(len(self._clocks))]
        value, *states = (
            where[0].clone().view(()) if clock else torch.cat(where)
            for where, clock in zip(places, [False, *self._clocks], strict=True)
        )
        opt = tree.unflatten(states, self._structure)
        grad = torch.cat([h.reshape(-1) for h in grads])
        new, new_opt = self.optimizer.update(self._hyper(lr, value), {"m": value}, opt, {"m": grad})
        return [value, *states], places, [new["m"], *tree.leaves(new_opt)]

    def _hyper(self, lr: float, like: Tensor) -> Any:
        """Return the hyperparameters; those of the last time, if they are the same."""
        key = (lr, like.dtype, like.device)
        if self._made[0] != key:
            hyper = self.optimizer.hyper(lr=lr)
            self._made = (key, tree.map(lambda x: x.to(dtype=like.dtype, device=like.device), hyper))
        return self._made[1]
