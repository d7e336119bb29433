"""Learning how to train from whole stretches of training: a step of meta for every horizon."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import tree, validation
from metafop.hypergradients import adjoint
from metafop.learned import Learned
from metafop.safeguards import Bound
from metafop.types import Batches, Estimator, Meta, Optimizer, OuterLoss, Trains, Tree


class UnrolledState(NamedTuple):
    """What was learned so far, and the meta-optimizer's state."""

    meta: Meta
    meta_opt: Tree


@dataclass(frozen=True)
class Unrolled:
    """Learns the parts of `meta` that `learn` names, by hypergradient, one horizon at a time.

    H = ∂ outer_loss(carry after all batches) / ∂meta,    meta' = meta_optimizer(meta, H)

    Learning rates move as log lr, decays as logit decay, matrices as they are (docs/math.md, 9). `estimator`
    is any of `hypergradients` over many steps. `clip` shortens H in these coordinates to a norm, for over a
    long horizon H may explode; `bounds` act on meta'. Meta moves only if the outer loss, H and meta' are
    finite: `info["moved"]` says so.

    >>> from metafop.unrolled import Unrolled
    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> meta, carry = training.meta(params, SGD().hyper(lr=0.01)), training.init(params)
    >>> learner, outer = Unrolled(training, Adam()), lambda carry: (carry.params["w"] - 1).square().sum()
    >>> outer_meta, state = learner.meta(meta, Adam().hyper(lr=0.1)), learner.init(meta)
    >>> for _ in range(40):
    ...     state, _, info = learner.step(outer_meta, state, outer, carry, 5 * [torch.ones(1)])
    >>> bool(info["value"] < 1e-3), bool(state.meta.hyper.lr > 0.2)
    (True, True)
    """

    training: Trains
    meta_optimizer: Optimizer
    learn: tuple[str, ...] = ("hyper.lr",)
    estimator: Estimator = adjoint
    clip: float | None = None
    bounds: tuple[Bound, ...] = ()

    def __post_init__(self) -> None:
        self.learned.check()
        validation.instance("Unrolled", "an estimator", self.estimator)
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            raise ValueError(
                f"Unrolled takes a clip above zero, got {self.clip!r}. Pass a number, or None for no clip."
            )

    @property
    def learned(self) -> Learned:
        """The leaves that move, and how."""
        return Learned("Unrolled", self.training, self.meta_optimizer, self.learn, self.bounds)

    def meta(self, meta: Meta, hyper: Any) -> Meta:
        """Return the outer meta: the meta-optimizer's `hyper`, as precise as what is learned."""
        return self.learned.outer_meta(meta, hyper)

    def init(self, meta: Meta) -> UnrolledState:
        return UnrolledState(meta, self.learned.init(meta))

    def step(
        self, outer_meta: Meta, state: UnrolledState, outer_loss: OuterLoss, carry: Any, batches: Batches
    ) -> tuple[UnrolledState, Any, dict[str, Any]]:
        """Return the state after one step of meta, the carry after all batches, and what the estimator saw.

        In info are "value", the outer loss; "norm", ‖H‖ in the learner's coordinates, before any clip;
        "moved"; and all that the estimator tells, "notes" among it.
        """
        self.learned.check_outer_meta(outer_meta)
        value, pulled, after, info = self.estimator(self.training, outer_loss, state.meta, carry, batches)
        grads = self.learned.of(self.learned.chained(state.meta, pulled))
        norm = _norm(grads)
        moves = value.isfinite() & tree.all_finite(grads)
        if self.clip is not None:
            grads = tree.scale(grads, (self.clip / norm).clamp(max=1))
        meta, meta_opt, moved = self.learned.moved(outer_meta, state.meta, state.meta_opt, grads, moves)
        return UnrolledState(meta, meta_opt), after, info | {"value": value, "norm": norm, "moved": moved}


def _norm(grads: dict[str, Tensor]) -> Tensor:
    """‖H‖, the largest number divided out first: where H explodes, its squares overflow before it does."""
    largest = torch.stack([h.abs().amax() for h in grads.values()]).amax()
    unit = torch.where(largest == 0, 1.0, largest)
    return largest * tree.norm(tree.map(lambda h: h / unit, grads))
