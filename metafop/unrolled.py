"""Learning how to train from whole stretches of training: a step of meta for every horizon."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import leaf_names, tree, validation
from metafop.diagnostics import Estimated, TrustTest
from metafop.hypergradients import adjoint
from metafop.hypergradients.graphs import detached
from metafop.hypergradients.validation import check_estimator, check_learnable
from metafop.leaf_names import MetaAndStart
from metafop.learned import Learned
from metafop.optimizers import completed
from metafop.protocols import Batches, CompleteOptimizer, Estimator, Optimizer, Trains
from metafop.safeguards import Bound
from metafop.types import Estimate, Meta, OuterLoss, Params, Tree


class UnrolledState(NamedTuple):
    """What a step of meta hands on to the next.

    meta: what was learned so far.
    meta_opt: the meta-optimizer's state.
    carry: that after the last step; `()` before the first. The next may start from it, or anywhere else.
    start: the parameters from which training starts, if they are learned; `()` if not.
    """

    meta: Meta
    meta_opt: Tree
    carry: Any = ()
    start: Params | tuple[()] = ()


@dataclass(frozen=True)
class Unrolled:
    """Learns the parts of `meta` that `learn` names, by hypergradient, one horizon at a time.

    H = ∂ outer_loss(carry after all batches) / ∂meta,    meta' = meta_optimizer(meta, H)

    Learning rates move as log lr, momentum as its logit, matrices and parameters as they are, leaves of the
    loss in the coordinates of their domains (docs/math.md, 9). Meta moves only if the outer loss, H and meta'
    are finite and every test of `trust` is passed: `info["moved"]` says so.

    training: what is learned, a `Training`, an `Online`, or `Tasks`.
    meta_optimizer: moves meta; any optimizer of the library, or one of your own.
    learn: names of leaves of meta, or the starts of some: "lr", "precond", "precond.conv1.weight" (("lr",),
        which every training has; `Online` and `optim.FOP` start from "precond", for which FOP is known).
        "start" stands for the parameters from which training starts, "start.head.bias" for one of them.
    estimator: any of `metafop.hypergradients` over many steps (`adjoint`).
    clip: the norm to which H is shortened, in the coordinates that move, for over a long horizon H may
        explode (None, no limit).
    trust: tests of `metafop.diagnostics` that an estimate must pass, or nothing is learned from it, such as
        `(Metasmooth(0.8), HalvesAgree(0.2))` (none).
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
    trust: tuple[TrustTest, ...] = ()
    bounds: tuple[Bound, ...] = ()
    _rule: CompleteOptimizer = field(init=False, repr=False, compare=False)  # the meta-optimizer, completed

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rule", completed("Unrolled", self.meta_optimizer))
        self.learned.check()
        check_estimator("Unrolled", self.estimator)
        if not isinstance(self.trust, tuple) or not all(map(callable, self.trust)):
            raise TypeError(
                f"Unrolled takes a tuple of tests as trust, got {self.trust!r}. "
                "Pass such as (metafop.diagnostics.HalvesAgree(0.1),)."
            )
        if self.trust and not self._learn_of_meta:
            raise ValueError(
                f"Unrolled learns {self.learn}, and tests of trust look at leaves of meta. Learn one, or "
                "pass none."
            )
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            raise ValueError(
                f"Unrolled takes a clip above zero, got {self.clip!r}. Pass a number, or None for no clip."
            )

    @property
    def learned(self) -> Learned:
        """The leaves that move, and how."""
        return Learned("Unrolled", self.training, self._rule, self.learn, self.bounds)

    def init_meta(self, meta: Meta, start: Params | tuple[()] = (), **hyper: Any) -> Meta:
        """Return the outer meta: the meta-optimizer's hyperparameters.

        meta: what is learned; hyperparameters take its precision.
        start: the parameters from which training starts, where they are learned (`()`).
        hyper: lr and the like, by name, as lr=0.1: numbers, or dicts of these by pattern of the names of what
            is learned, such as `lr={"precond.*": 1e-3, "hyper.lr": 1e-2}`. What is left out has the
            meta-optimizer's default.
        """
        return self.learned.outer_meta(self._with_start(meta, start), hyper)

    def init(self, meta: Meta, start: Params | tuple[()] = ()) -> UnrolledState:
        """Return the state that learning starts from.

        meta: from `training.init_meta`.
        start: the parameters from which training starts, where they are learned (`()`).
        """
        meta, start = detached((meta, start))  # or a record of every step would be kept
        all_of_it = self._with_start(meta, start)
        meta_opt = self.learned.init(all_of_it)
        check_learnable(self.estimator, tuple(self.learned.of(all_of_it)))
        return UnrolledState(meta, meta_opt, (), start)

    def step(
        self, outer_meta: Meta, state: UnrolledState, outer_loss: OuterLoss, carry: Any, batches: Batches
    ) -> tuple[UnrolledState, dict[str, Any]]:
        """Return the state after one step of meta, and what the estimator saw.

        outer_meta: from `init_meta`.
        state: that before the step.
        outer_loss: `outer_loss(carry)`, or `outer_loss(carry, meta)`, is a scalar, of the carry after all
            batches.
        carry: where training starts: from `training.init`, from an estimator's own `init`, or `state.carry`.
            If the start is learned, `state.start` takes the place of its parameters: for each task, where
            those have one dimension more.
        batches: a sequence with one for each step of training, the same whenever it is asked.

        The carry after all batches is in the new state: it starts the next window. In info are "value", the
        outer loss; "norm", ‖H‖ in the learner's coordinates, before any clip; "moved"; "trust/…", what each
        test found; and all that the estimator tells, "notes" among it.
        """
        self.learned.check_outer_meta(outer_meta)
        carry = _starting_from(state.start, carry)
        estimate = self.estimator(self.training, outer_loss, state.meta, carry, batches)
        here = self._with_start(state.meta, state.start)
        pulled = self._with_start(estimate.grads, _of_start(state.start, estimate))
        grads = self.learned.of(self.learned.chained(here, pulled))
        norm = _norm(grads)
        moves = estimate.value.isfinite() & tree.all_finite(grads)
        passed, trusted = self._trusted(estimate, outer_loss, state.meta, carry, batches)
        if self.clip is not None:
            grads = tree.scale(grads, (self.clip / norm).clamp(max=1))
        moved, meta_opt, has_moved = self.learned.moved(
            outer_meta, here, state.meta_opt, grads, moves & passed
        )
        meta, start = (moved.meta, moved.start) if isinstance(moved, MetaAndStart) else (moved, ())
        info = estimate.info | trusted | {"value": estimate.value, "norm": norm, "moved": has_moved}
        return UnrolledState(meta, meta_opt, estimate.carry, start), info

    def learned_leaves(self, state: UnrolledState) -> dict[str, Tensor]:
        """Return what is learned as it is in a `state`, by name, such as "hyper.lr" or "loss.weights"."""
        return self.learned.of(self._with_start(state.meta, state.start))

    @property
    def _learn_of_meta(self) -> tuple[str, ...]:
        return tuple(part for part in self.learn if not leaf_names.names_start((part,)))

    def _with_start(self, meta: Meta, start: Params | tuple[()]) -> Meta | MetaAndStart:
        """Return all that may be learned: the start too if it is, or refuse one that is missing."""
        if not leaf_names.names_start(self.learn):
            if start:
                raise ValueError(
                    f"Unrolled got a start and learns {self.learn}, in which it is not. "
                    'Name "start" in learn, or pass none.'
                )
            return meta
        if not start:
            raise ValueError(
                f"Unrolled learns {self.learn}, the start among it, and got none. Pass the parameters: "
                "learner.init_meta(meta, params, lr=...) and learner.init(meta, params)."
            )
        validation.params(start)
        return MetaAndStart(*meta, start)

    def _trusted(
        self, estimate: Estimate, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return whether an estimate passes every test, and what each found, with a note if it does not."""
        given = (self.training, outer_loss, meta, carry, batches)
        estimated = Estimated(self.estimator, *given, self._learn_of_meta, estimate)
        passed, found, notes = torch.ones_like(estimate.value, dtype=torch.bool), {}, []
        for test in self.trust:
            verdict = test(estimated)
            passed, found[f"trust/{verdict.name}"] = passed & verdict.passed, verdict.measured
            if tree.is_surely(~verdict.passed):
                notes.append(
                    f"Nothing is learned from this estimate: its {verdict.name} is {verdict.measured:.3g}, "
                    f"and {test} asks for {verdict.asked}."
                )
        return passed, found | {"notes": (*estimate.info["notes"], *notes)}


def _starting_from(start: Params | tuple[()], carry: Any) -> Any:
    """Return the carry with the learned parameters for its own, or refuse one that they do not fit."""
    if not start:
        return carry
    validation.carry(carry)
    shapes, own = (tree.map(lambda p: tuple(p.shape), params) for params in (carry.params, start))
    if shapes.keys() != own.keys() or any(shapes[k][len(shapes[k]) - len(own[k]) :] != own[k] for k in own):
        raise ValueError(
            f"Unrolled learns a start with the parameters {own}, got a carry with {shapes}. Make it from the "
            "same: training.init(params)."
        )
    return tree.with_params(carry, [start[k].expand(shape).clone() for k, shape in shapes.items()])


def _of_start(start: Params | tuple[()], estimate: Estimate) -> Params | tuple[()]:
    """Return the derivative in the learned start: of many tasks, their sum."""
    if not start:
        return ()
    return {k: estimate.start.params[k].sum_to_size(p.shape) for k, p in start.items()}


def _norm(grads: dict[str, Tensor]) -> Tensor:
    """‖H‖, the largest number divided out first: where H explodes, its squares overflow before it does."""
    largest = torch.stack([h.abs().amax() for h in grads.values()]).amax()
    unit = torch.where(largest == 0, 1.0, largest)
    return largest * tree.norm(tree.map(lambda h: h / unit, grads))
