"""Which leaves of meta are learned, in which coordinate they move, and what an optimizer makes of them."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from metafop import leaf_names, tree, validation
from metafop.leaf_names import MetaAndStart
from metafop.optimizers.hyper import extremes, fitted
from metafop.preconditioners import aged
from metafop.protocols import CompleteOptimizer, Domain, Trains
from metafop.safeguards import Bound
from metafop.types import Meta, Tree

LearnedTree = TypeVar("LearnedTree", bound=Meta | MetaAndStart)


@dataclass(frozen=True)
class Learned:
    """The leaves of meta that `learn` names: lr moves as log lr, momentum as its logit, M as it is.

    h = dx/dz ∂x,    z' = optimizer(z, h),    x' = x(z')    (docs/math.md, 9)

    Each of its names is a leaf or the start of some. The time of a `Rescaled` family is never learned: it
    passes, by one with each step that is learned from. `learner` is who learns, in the sentences of what is
    refused.
    """

    learner: str
    training: Trains
    optimizer: CompleteOptimizer
    learn: tuple[str, ...]
    bounds: tuple[Bound, ...]

    def check(self) -> None:
        """Refuse settings that are of the wrong kind."""
        if not isinstance(self.bounds, tuple):
            raise TypeError(
                f"{self.learner} takes a tuple of bounds, got {self.bounds!r}. Pass bounds=(...,)."
            )
        leaf_names.check(self.learner, self.learn)

    def outer_meta(self, meta: Meta | MetaAndStart, hyper: Mapping[str, Any]) -> Meta:
        """Return the outer meta: the optimizer's own hyperparameters, as precise as what is learned."""
        return Meta(fitted(self.optimizer, hyper, self.of(meta)), {})

    def check_outer_meta(self, outer_meta: Meta) -> None:
        made_by = f"{self.learner.lower()}.init_meta(meta, lr=...)"
        if not isinstance(outer_meta, Meta):
            raise TypeError(
                f"{self.learner} takes as its outer meta what {made_by} returns, "
                f"got {type(outer_meta).__name__}. Pass the former."
            )
        if outer_meta.precond or tree.leaves(outer_meta.loss):
            raise ValueError(
                f"{self.learner} takes as its outer meta what {made_by} returns, got a meta of the "
                f"parameters {sorted(outer_meta.precond)}. Pass the former; the latter is in the state "
                "already."
            )
        validation.tensors("hyper", outer_meta.hyper)

    def init(self, meta: Meta | MetaAndStart) -> Tree:
        """Return the optimizer's state before the first step, or refuse a leaf that could never move."""
        learned = self.of(meta)
        for name, value in learned.items():
            for place, number in extremes(name, value):
                if not self._domain(name).inside(number):
                    raise ValueError(
                        f"{self.learner} cannot learn {place} from {number:g}, on the boundary of its range: "
                        "it would stay there. Start inside, or name in learn only what is to move."
                    )
        return self.optimizer.init(learned)

    def of(self, meta: Meta | MetaAndStart) -> dict[str, Tensor]:
        """Return the leaves that move, by name."""
        passing, learned = leaf_names.times(meta), leaf_names.named(self.learner, self.learn, meta)
        return {name: leaf for name, leaf in learned.items() if name not in passing}

    def chained(self, meta: Meta | MetaAndStart, grads: LearnedTree) -> LearnedTree:
        """Return the derivatives in the coordinates of what is learned; zero in all else."""
        values = self.of(meta)

        def chained(name: str, h: Tensor) -> Tensor:
            return self._domain(name).chain(values[name], h) if name in values else torch.zeros_like(h)

        return tree.map_named(chained, grads)

    def moved(
        self, outer_meta: Meta, meta: LearnedTree, opt: Tree, grads: dict[str, Tensor], moves: Tensor
    ) -> tuple[LearnedTree, Tree, Tensor]:
        """Return meta and the optimizer's state after its step, and whether meta has moved.

        The step is taken if it may be (`moves`) and if where it leads is finite. A step of zero, or one that
        is lost in rounding, moves nothing.
        """
        values = self.of(meta)
        old = {name: self._domain(name).coordinate(value) for name, value in values.items()}
        # What is not used must be finite too: a derivative through `where` multiplies it by zero.
        usable = tree.zero_unless(moves, grads)
        new, new_opt = self.optimizer.update(outer_meta.hyper, old, opt, usable)
        moved = {
            name: self._domain(name).moved(value, old[name], new[name]) for name, value in values.items()
        }
        new_meta = tree.replace(meta._replace(precond={k: aged(m) for k, m in meta.precond.items()}), moved)
        if self.bounds:
            new_meta = self._bounded(meta, new_meta, moved)
        leaves = tree.named(new_meta)
        here, there = _flat(values.values()), _flat(leaves[name] for name in values)
        moves = moves & tree.all_finite(there)
        return *tree.where(moves, (new_meta, new_opt), (meta, opt)), moves & (there != here).any()

    def _bounded(self, meta: LearnedTree, new: Any, moved: Collection[str]) -> LearnedTree:
        """Return the `new` meta within the bounds, which leave alone what has not `moved`."""
        moving = {*moved, *leaf_names.times(meta)}
        for bound in self.bounds:
            new = bound(new)
        return tree.replace(meta, {k: x for k, x in tree.named(new).items() if k in moving})

    def _domain(self, name: str) -> Domain:
        return leaf_names.domain(self.training, name)


def _flat(leaves: Iterable[Tensor]) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in leaves])
