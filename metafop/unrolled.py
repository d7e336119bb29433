"""Learning how to train from whole stretches of training: a step of meta for every horizon."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.hypergradients import adjoint
from metafop.hypergradients.validation import check_estimator
from metafop.learned import Learned
from metafop.optimizers import completed
from metafop.safeguards import Bound
from metafop.types import Batches, CompleteOptimizer, Estimator, Meta, Optimizer, OuterLoss, Trains, Tree


class UnrolledState(NamedTuple):
    """What a step of meta hands on to the next.

    meta: what was learned so far.
    meta_opt: the meta-optimizer's state.
    carry: that after the last step; `()` before the first. The next may start from it, or anywhere else.
    """

    meta: Meta
    meta_opt: Tree
    carry: Any = ()


@dataclass(frozen=True)
class Unrolled:
    """Learns the parts of `meta` that `learn` names, by hypergradient, one horizon at a time.

    H = ∂ outer_loss(carry after all batches) / ∂meta,    meta' = meta_optimizer(meta, H)

    Learning rates move as log lr, momentum as its logit, matrices as they are (docs/math.md, 9). Meta moves
    only if the outer loss, H and meta' are finite: `info["moved"]` says so.

    training: what is learned, a `Training` or an `Online`.
    meta_optimizer: moves meta; any optimizer of the library, or one of your own.
    learn: names of leaves of meta, or the starts of some: "lr", "precond", "precond.conv1.weight" (("lr",),
        which every training has; `Online` and `optim.FOP` start from "precond", for which FOP is known).
    estimator: any of `metafop.hypergradients` over many steps (`adjoint`).
    clip: the norm to which H is shortened, in the coordinates that move, for over a long horizon H may
        explode (None, no limit).
    bounds: what is done to meta', from `metafop.safeguards` (none).

    >>> from metafop.unrolled import Unrolled
    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> meta, carry = training.init_meta(params, lr=0.01), training.init(params)
    >>> learner, outer = Unrolled(training, Adam()), lambda carry: (carry.params["w"] - 1).square().sum()
    >>> outer_meta, state = learner.init_meta(meta, lr=0.1), learner.init(meta)
    >>> for _ in range(40):
    ...     state, info = learner.step(outer_meta, state, outer, carry, 5 * [torch.ones(1)])
    >>> bool(info["value"] < 1e-3), bool(state.meta.hyper.lr > 0.2)
    (True, True)
    """

    training: Trains
    meta_optimizer: Optimizer
    learn: tuple[str, ...] = ("lr",)
    estimator: Estimator = adjoint
    clip: float | None = None
    bounds: tuple[Bound, ...] = ()
    _rule: CompleteOptimizer = field(init=False, repr=False, compare=False)  # the meta-optimizer, completed

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rule", completed("Unrolled", self.meta_optimizer))
        self.learned.check()
        check_estimator("Unrolled", self.estimator)
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            raise ValueError(
                f"Unrolled takes a clip above zero, got {self.clip!r}. Pass a number, or None for no clip."
            )

    @property
    def learned(self) -> Learned:
        """The leaves that move, and how."""
        return Learned("Unrolled", self.training, self._rule, self.learn, self.bounds)

    def init_meta(self, meta: Meta, **hyper: Any) -> Meta:
        """Return the outer meta: the meta-optimizer's hyperparameters.

        meta: what is learned; hyperparameters take its precision.
        hyper: lr and the like, by name, as lr=0.1: numbers, or dicts of these by pattern of the names of what
            is learned, such as `lr={"precond.*": 1e-3, "hyper.lr": 1e-2}`. What is left out has the
            meta-optimizer's default.
        """
        return self.learned.outer_meta(meta, hyper)

    def init(self, meta: Meta) -> UnrolledState:
        """Return the state that learning starts from, at a `meta` from `training.init_meta`."""
        return UnrolledState(meta, self.learned.init(meta))

    def step(
        self, outer_meta: Meta, state: UnrolledState, outer_loss: OuterLoss, carry: Any, batches: Batches
    ) -> tuple[UnrolledState, dict[str, Any]]:
        """Return the state after one step of meta, and what the estimator saw.

        outer_meta: from `init_meta`.
        state: that before the step.
        outer_loss: `outer_loss(carry)` is a scalar, of the carry after all batches.
        carry: where training starts: from `training.init`, from an estimator's own `init`, or `state.carry`.
        batches: a sequence with one for each step of training, the same whenever it is asked.

        The carry after all batches is in the new state: it starts the next window. In info are "value", the
        outer loss; "norm", ‖H‖ in the learner's coordinates, before any clip; "moved"; and all that the
        estimator tells, "notes" among it.
        """
        self.learned.check_outer_meta(outer_meta)
        value, pulled, after, info = self.estimator(self.training, outer_loss, state.meta, carry, batches)
        grads = self.learned.of(self.learned.chained(state.meta, pulled))
        norm = _norm(grads)
        moves = value.isfinite() & tree.all_finite(grads)
        if self.clip is not None:
            grads = tree.scale(grads, (self.clip / norm).clamp(max=1))
        meta, meta_opt, moved = self.learned.moved(outer_meta, state.meta, state.meta_opt, grads, moves)
        return UnrolledState(meta, meta_opt, after), info | {"value": value, "norm": norm, "moved": moved}


def _norm(grads: dict[str, Tensor]) -> Tensor:
    """‖H‖, the largest number divided out first: where H explodes, its squares overflow before it does."""
    largest = torch.stack([h.abs().amax() for h in grads.values()]).amax()
    unit = torch.where(largest == 0, 1.0, largest)
    return largest * tree.norm(tree.map(lambda h: h / unit, grads))
