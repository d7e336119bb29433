"""Moves many small tensors by a pure optimizer, in one update for all that are of one age."""

from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from metafop import tree
from metafop.optimizers import Adam
from metafop.types import Optimizer

Undo = list[tuple[list[Tensor], list[Tensor]]]  # where something was written, and what was there before


class Steered(Optimizer, Protocol):
    """An optimizer that can be steered by its lr alone."""

    def hyper(self, lr: float) -> Any: ...


class Leaf:
    """A tensor that is learned, the optimizer's states for it, and how many updates it has had.

    The tensors are changed in place.
    """

    def __init__(self, value: Tensor, opt: list[Tensor], age: int) -> None:
        self.value, self.opt, self.age = value, opt, age


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

    def move(self, lr: float, leaves: list[Leaf], grads: list[Tensor], undo: Undo | None) -> None:
        """Move each tensor along its hypergradient; none, if what comes of it is not finite.

        What is written over goes to `undo`, if that is given.
        """
        if type(self.optimizer) is Adam and all(map(_suits_kernel, leaves, grads)):
            self._move_fused(lr, leaves, grads, undo)
        else:
            self._move(lr, leaves, grads, undo)
        for leaf in leaves:
            leaf.age += 1

    def _move_fused(self, lr: float, leaves: list[Leaf], grads: list[Tensor], undo: Undo | None) -> None:
        """Let torch's fused Adam move them, in place and in one call: the same but for rounding."""
        values = [leaf.value for leaf in leaves]
        times, means, squares = ([leaf.opt[j] for leaf in leaves] for j in range(3))
        if undo is not None:
            written = [*values, *times, *means, *squares]
            undo.append((written, list(torch._foreach_mul(written, 1.0))))  # copies
        torch._foreach_add_(times, 1)  # time passes in any case, as ages do
        if not all(map(isfinite, torch._foreach_norm(grads))):
            return
        numbers, _ = self._hyper(lr, values[0])
        grads = [grad.contiguous() for grad in grads]
        torch._fused_adam_(values, grads, means, squares, [], times, **numbers, amsgrad=False, maximize=False)

    def _move(self, lr: float, leaves: list[Leaf], grads: list[Tensor], undo: Undo | None) -> None:
        """Make vectors of all that are of one age, and move these."""
        alike: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            alike.setdefault((leaf.value.dtype, leaf.value.device, leaf.age), []).append(i)
        moves = [self._moved(lr, [leaves[i] for i in of], [grads[i] for i in of]) for of in alike.values()]
        finite = tree.all_finite([new[0] for _, _, new in moves])
        for of, (old, places, new) in zip(alike.values(), moves, strict=True):
            sizes = [leaves[i].value.numel() for i in of]
            for before, where, after, clock in zip(old, places, new, [False, *self._clocks], strict=True):
                kept = after if clock else torch.where(finite, after, before)  # a clock goes on, as ages do
                pieces = [kept.view(1)] * len(of) if clock else list(kept.split(sizes))
                if undo is not None:
                    undo.append((where, [before.view(1)] * len(of) if clock else list(before.split(sizes))))
                torch._foreach_copy_(where, pieces)

    def _moved(
        self, lr: float, leaves: list[Leaf], grads: list[Tensor]
    ) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
        """Return value and states of leaves of one age, as vectors: before, where they lie, and after."""
        columns = zip(*([leaf.value, *leaf.opt] for leaf in leaves), strict=True)
        places = [[x.view(-1) for x in column] for column in columns]
        value, *states = (
            where[0].clone().view(()) if clock else torch.cat(where)
            for where, clock in zip(places, [False, *self._clocks], strict=True)
        )
        opt = tree.unflatten(states, self._structure)
        grad = torch.cat([h.reshape(-1) for h in grads])
        _, hyper = self._hyper(lr, value)
        new, new_opt = self.optimizer.update(hyper, {"m": value}, opt, {"m": grad})
        return [value, *states], places, [new["m"], *tree.leaves(new_opt)]

    def _hyper(self, lr: float, like: Tensor) -> tuple[dict[str, Any], Any]:
        """Return the hyperparameters as numbers and as tensors, made anew if anything has changed."""
        key = (lr, like.dtype, like.device)
        if self._made[0] != key:
            hyper = self.optimizer.hyper(lr=lr)
            numbers = {name: x.item() for name, x in hyper._asdict().items()}
            tensors = tree.map(lambda x: x.to(dtype=like.dtype, device=like.device), hyper)
            self._made = key, (numbers, tensors)
        return self._made[1]


def _suits_kernel(leaf: Leaf, grad: Tensor) -> bool:
    """Return whether speed is worth more than bits: in double precision they are those of `Online`."""
    value = leaf.value
    return (
        value.dtype is grad.dtype is torch.float32
        and value.shape == grad.shape
        and value.device.type == "cpu"
        and value.is_contiguous()
    )
