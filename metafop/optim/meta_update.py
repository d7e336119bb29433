"""The meta-optimizer's step: a pure optimizer moves M, and the offsets of a learned lr and momentum."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.optim import fused_adam
from metafop.optimizers import Adam, completed
from metafop.protocols import Optimizer


class Leaf(NamedTuple):
    """A tensor that is learned, and the meta-optimizer's state for it, as a flat list."""

    value: Tensor
    state: list[Tensor]


class MetaOptimizer:
    """A pure optimizer for tensors that are learned side by side, each with a state of its own.

    It must need no hyperparameter but its lr.

    >>> from metafop.optim.meta_update import Leaf, MetaOptimizer
    >>> meta, m = MetaOptimizer(SGD()), torch.ones(2)
    >>> meta.update(0.5, [Leaf(m, meta.init(m))], [torch.ones(2)])
    [Leaf(value=tensor([0.5000, 0.5000]), state=[])]
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = completed("FOP", optimizer)
        states, self._structure = tree.flatten(optimizer.init({"m": torch.zeros(2)}))
        # States that are one number for a whole tensor count steps, such as Adam's time.
        self._is_count = [state.dim() == 0 for state in states]
        self._last_hyper: tuple[Any, Any] = (None, None)

    def __reduce__(self) -> tuple[type, tuple[Optimizer]]:
        return MetaOptimizer, (self.optimizer,)  # torch's descriptions of trees cannot be copied

    @property
    def states(self) -> int:
        """How many tensors its state for one tensor has."""
        return len(self._is_count)

    def init(self, value: Tensor) -> list[Tensor]:
        return tree.leaves(self.optimizer.init({"m": value}))

    def update(self, lr: float, leaves: list[Leaf], grads: list[Tensor]) -> list[Leaf]:
        """Return the leaves after a step along their hypergradients.

        If that led anywhere to what is not finite, all stay where they are, and only steps are counted.
        """
        values, states = [leaf.value for leaf in leaves], [leaf.state for leaf in leaves]
        hyper = self._hyper(lr, values[0])
        if type(self.optimizer) is Adam and fused_adam.suits(values, grads):
            new = fused_adam.update(hyper.numbers, values, states, grads)
            return [Leaf(value, state) for value, *state in new]
        moved = [self._moved(lr, leaf, grad) for leaf, grad in zip(leaves, grads, strict=True)]
        finite = tree.all_finite([leaf.value for leaf in moved])
        return [self._kept(finite, new, old) for new, old in zip(moved, leaves, strict=True)]

    def _moved(self, lr: float, leaf: Leaf, grad: Tensor) -> Leaf:
        state = tree.unflatten(leaf.state, self._structure)
        hyper = self._hyper(lr, leaf.value).tensors
        new, state = self.optimizer.update(hyper, {"m": leaf.value}, state, {"m": grad})
        return Leaf(new["m"], tree.leaves(state))

    def _kept(self, finite: Tensor, new: Leaf, old: Leaf) -> Leaf:
        state = [
            after if is_count else torch.where(finite, after, before)
            for after, before, is_count in zip(new.state, old.state, self._is_count, strict=True)
        ]
        return Leaf(torch.where(finite, new.value, old.value), state)

    def _hyper(self, lr: float, like: Tensor) -> "_Hyper":
        """Return the hyperparameters, made anew if anything has changed: making them validates them."""
        key = (lr, like.dtype, like.device)
        if self._last_hyper[0] != key:
            with torch.device("cpu"):  # another default, such as meta, may have no values
                hyper = self.optimizer.hyper(lr=lr)
            numbers = fused_adam.numbers(hyper) if type(self.optimizer) is Adam else {}
            tensors = tree.map(lambda x: x.to(dtype=like.dtype, device=like.device), hyper)
            self._last_hyper = key, _Hyper(numbers, tensors)
        return self._last_hyper[1]


class _Hyper(NamedTuple):
    numbers: dict[str, float]
    tensors: Any
