"""Forward: how the carry depends on meta goes along with training. Memory does not grow with T."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metafop import leaf_names, tree
from metafop.hypergradients.checks.buffers import MissedBuffers
from metafop.hypergradients.checks.hessian import second_derivative
from metafop.hypergradients.checks.leaves import look_at_leaves
from metafop.hypergradients.checks.repeat import check_repeated, repeats_after, rounding
from metafop.hypergradients.differentiation import differentiation
from metafop.hypergradients.graphs import detached
from metafop.hypergradients.info import unroll_info
from metafop.hypergradients.outer_loss import Cotangent, differentiated, value_of
from metafop.hypergradients.step_jvp import StepJVP, Tangents, dots
from metafop.hypergradients.validation import (
    Skip,
    accepted,
    batch_at,
    check_progress,
    check_skip,
    explained_errors,
    horizon,
)
from metafop.protocols import Batches, Trains
from metafop.types import Estimate, Meta, OuterLoss, Params, Progress


class ForwardCarry(NamedTuple):
    """A carry and how it depends on meta: the next window goes on from both.

    carry: that of the training.
    tangents: Ċ, for each floating-point leaf of the carry one row for each learned number; `()` where nothing
        was differentiated yet.
    """

    carry: Any
    tangents: Tangents | tuple[()]


@dataclass(frozen=True)
class Forward:
    """The exact hypergradient through T steps, going forward: Ċ = ∂carry/∂meta is carried along.

    Ċ_(t+1) = ∂step/∂carry Ċ_t + ∂step/∂meta,    ∂value/∂meta = ⟨∂value/∂carry_T, Ċ_T⟩    (docs/math.md, 22)

    Every learned number has a row of Ċ, as large as a carry, and each step takes every row through one
    Hessian-vector product: this suits few numbers and any horizon. Where torch cannot differentiate the
    gradient forward, a note says so and it is done in reverse.

    From `forward.init(carry)` it goes on from window to window: each estimate is the derivative through all
    steps so far. If meta moves in between, this is real-time recurrent learning: Ċ adds up what every step
    did with the meta of its time. From a plain carry, Ċ starts at zero. `info["tangents"]` holds the norms of
    Ċ_0 … Ċ_T.

    learn: names of leaves of meta, or the starts of some, as for `Unrolled`; "start", or the name of a
        parameter behind it, for where the first window starts from (None, all of meta).
    skip: checks to leave out, as for `Adjoint` (none).
    progress: called after each step, as by `Adjoint` (None).

    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> meta, carry = training.init_meta(params, lr=0.25), training.init(params)
    >>> forward, end = Forward(learn=("lr",)), lambda carry: carry.params["w"].sum()
    >>> first = forward(training, end, meta, forward.init(carry), [torch.ones(1)])
    >>> second = forward(training, end, meta, first.carry, [torch.ones(1)])
    >>> second.value, second.grads.hyper.lr  # w = 1 - (1 - 2 lr)², through both windows
    (tensor(0.7500), tensor(2.))
    """

    learn: tuple[str, ...] | None = None
    skip: Skip = ()
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_skip("Forward", self.skip)
        check_progress("Forward", self.progress)
        if self.learn is not None:
            leaf_names.check("Forward", self.learn)

    def init(self, carry: Any) -> ForwardCarry:
        """Return where windows start: the `carry`, which depends on nothing yet."""
        return ForwardCarry(carry, ())

    def check_learnable(self, names: tuple[str, ...]) -> None:
        """Refuse to learn leaves of these `names` if there is one that `learn` does not name."""
        leaf_names.check_learnable("Forward", self.learn, names)

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        goes_on = isinstance(carry, ForwardCarry)
        meta, now = accepted(meta, carry.carry if goes_on else carry)
        with explained_errors():
            estimate = self._estimate(
                training, outer_loss, meta, ForwardCarry(now, carry.tangents if goes_on else ()), batches
            )
        return estimate if goes_on else estimate._replace(carry=estimate.carry.carry)

    def _estimate(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: ForwardCarry, batches: Batches
    ) -> Estimate:
        start, continued = carry.carry, len(carry.tangents) > 0
        steps, first = horizon(training, meta, start, batches), batch_at(batches, 0)
        learned = self._learned(meta, start)
        tangents = detached(_fitting(carry.tangents, start, learned))
        after, sizes = start, tree.norm(tangents)[None]
        values = tangents[0].new_zeros(0)
        how = differentiation(training, "forward", meta, start, first)
        missed = MissedBuffers(training, meta, start, steps, self.skip, continued)
        step = StepJVP(training, meta, _basis(learned), how.over)
        with how.context(), second_derivative(training, meta, how.over, self.skip) as second:
            on_leaves = look_at_leaves(training, how.over, self.skip, outer_loss, meta, start, batches)
            for t in range(steps):
                batch, before = batch_at(batches, t), after
                after, seen, tangents = detached(step(before, batch, tangents))
                if second.is_due():
                    second.look(before, batch)
                missed.at(t, before, batch, seen, after=after)
                # Not lists: over many steps, small tensors that stay would scatter the memory of large ones.
                values = torch.cat([values, seen.value[None]])
                sizes = torch.cat([sizes, tree.norm(tangents)[None]])
                if self.progress is not None:
                    self.progress("forward", t + 1, steps)
                if "repeat" not in self.skip and t == repeats_after(steps):
                    again = training.evaluate(meta, start, batch_at(batches, 0)).value
                    check_repeated(0, [values[0]], [again], rounding(values[:1].unbind())[0])
            outer = differentiated(outer_loss, meta, after)
            zeros = left_out(meta, learned, outer.d_meta)
            buffers = missed.note(partial(value_of, outer_loss, meta), after, outer.value)
        found = _contracted(tangents, outer.cotangent, learned)
        grads, d_start = _by_place(found, outer.d_meta, learned, start)
        notes = (*how.notes, *second.notes, *on_leaves, zeros, buffers)
        # Of what overflowed in grads, tangents tell more.
        info = unroll_info(after, outer.value, tree.zeros_like(meta), values.unbind(), notes=notes)
        info = _overflow(info | {"tangents": sizes}, found)
        return Estimate(outer.value, grads, d_start, ForwardCarry(after, tangents), info)

    def _learned(self, meta: Meta, carry: Any) -> leaf_names.Leaves:
        """Return the leaves that are learned, those of the start among them if it is."""
        if self.learn is None:
            return tree.named(meta)
        start = carry.params if leaf_names.names_start(self.learn) else ()
        return leaf_names.named("Forward", self.learn, leaf_names.MetaAndStart(*meta, start))


def left_out(meta: Meta, learned: leaf_names.Leaves, found: Meta | tuple[()] = ()) -> str:
    """Say for what zeros stand, if for any: leaves of meta that are not learned.

    Those in which a derivative is `found` all the same, that of an outer loss, are named apart.
    """
    others = [name for name in tree.named(meta) if name not in learned]
    partly = [name for name, d in tree.named(found).items() if name in others and _is_read(d)]
    zeros = [name for name in others if name not in partly]
    return " ".join(
        sentence.format(", ".join(names))
        for sentence, names in (
            ("Zeros stand for the derivatives in what learn does not name: {}.", zeros),
            ("The derivatives in {}, which learn does not name, are those of the outer loss alone.", partly),
        )
        if names
    )


def _is_read(d: Tensor) -> bool:
    return tree.is_surely(d.any())


forward = Forward()


def _basis(learned: leaf_names.Leaves) -> leaf_names.Leaves:
    """Return the direction of every learned number, one a row: the identity, cut into leaves."""
    numbers, start, basis = _numbers(learned), 0, {}
    for name, leaf in learned.items():
        identity = torch.eye(numbers, dtype=leaf.dtype, device=leaf.device)
        basis[name] = identity[:, start : start + leaf.numel()].reshape(numbers, *leaf.shape)
        start += leaf.numel()
    return basis


def _fitting(tangents: Tangents | tuple[()], carry: Any, learned: leaf_names.Leaves) -> Tangents:
    """Return the tangents to start from: if none, zeros, and the identity in what is learned of the start."""
    floats, rebuild = tree.partition(carry)
    shapes = [(_numbers(learned), *leaf.shape) for leaf in floats]
    if tangents and [tuple(d.shape) for d in tangents] != shapes:
        raise ValueError(
            f"This ForwardCarry has tangents for {len(tangents[0])} numbers, but {_numbers(learned)} are "
            f"learned ({', '.join(learned)}). Start again with forward.init(carry.carry)."
        )
    if tangents:
        return list(tangents)
    zeros = rebuild([leaf.new_zeros(shape) for leaf, shape in zip(floats, shapes, strict=True)])
    basis = _basis(learned)
    params: Params = zeros.params
    own = tree.with_params(zeros, [basis.get(f"start.{k}", d) for k, d in params.items()])
    return tree.partition(own)[0]


def _numbers(learned: leaf_names.Leaves) -> int:
    return sum(leaf.numel() for leaf in learned.values())


def _contracted(tangents: Tangents, cotangent: Cotangent, learned: leaf_names.Leaves) -> leaf_names.Leaves:
    """Return ⟨∂value/∂carry, Ċ⟩ for every learned number, each in its place."""
    parts = dots(tangents, cotangent).split([leaf.numel() for leaf in learned.values()])
    return {
        name: part.view(leaf.shape).to(leaf.dtype)
        for (name, leaf), part in zip(learned.items(), parts, strict=True)
    }


def _by_place(
    found: leaf_names.Leaves, d_meta: Meta, learned: leaf_names.Leaves, carry: Any
) -> tuple[Meta, Any]:
    """Return the derivative in meta, that of the outer loss added, and in the start; `()` if not learned."""
    named = tree.named(d_meta)
    grads = tree.replace(d_meta, {k: named[k] + d for k, d in found.items() if k in named})
    if not any(k.startswith("start.") for k in learned):
        return grads, ()
    zeros = tree.zeros_like(carry)
    params: Params = zeros.params
    return grads, tree.with_params(zeros, [found.get(f"start.{k}", d) for k, d in params.items()])


def _overflow(info: dict[str, Any], found: leaf_names.Leaves) -> dict[str, Any]:
    """Return info with a note if the hypergradient overflowed where training did not."""
    if not tree.is_known(info["tangents"]) or info["overflow"] >= 0 or tree.all_finite(found):
        return info
    steps = len(info["values"])
    step = next((t for t, size in enumerate(info["tangents"]) if not size.isfinite()), steps)
    note = (
        f"The hypergradient overflowed: ∂carry/∂meta is not finite after {step} of {steps} steps. "
        "Use a shorter horizon, a smaller lr, or evolution."
    )
    return info | {"overflow": torch.tensor(step), "notes": (*info["notes"], note)}
