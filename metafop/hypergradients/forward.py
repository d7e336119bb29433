"""Forward: how the carry depends on meta goes along with training. Memory does not grow with T."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vjp, vmap

from metafop import leaf_names, stopped_gradients, tree
from metafop.hypergradients.checks.buffers import MissedBuffers
from metafop.hypergradients.checks.hessian import second_derivative
from metafop.hypergradients.checks.repeat import check_repeated, repeats_after, rounding
from metafop.hypergradients.differentiation import differentiation
from metafop.hypergradients.graphs import detached, with_constant_buffers
from metafop.hypergradients.info import unroll_info
from metafop.hypergradients.locked_jvp import jvp
from metafop.hypergradients.outer_loss import Cotangent, value_and_cotangent
from metafop.hypergradients.step_vjp import Over
from metafop.hypergradients.validation import (
    Skip,
    batch_at,
    check_progress,
    check_skip,
    explained_errors,
    horizon,
)
from metafop.types import Batch, Batches, Estimate, Meta, OuterLoss, Params, Progress, Seen, Trains

Tangents = list[Tensor]  # for each floating-point leaf of a carry, one row for each learned number


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

    learn: names of leaves of meta, or the starts of some, as for `Unrolled` (None, all).
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

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        goes_on, (meta, carry) = isinstance(carry, ForwardCarry), detached((meta, carry))
        with explained_errors():
            estimate = self._estimate(training, outer_loss, meta, carry, batches)
        return estimate if goes_on else estimate._replace(carry=estimate.carry.carry)

    def _estimate(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        start, tangents = carry if isinstance(carry, ForwardCarry) else self.init(carry)
        continued = len(tangents) > 0
        steps, first = horizon(training, meta, start, batches), batch_at(batches, 0)
        learned = learned_leaves("Forward", self.learn, meta)
        tangents = _fitting(tangents, start, learned)
        after, sizes = start, tree.norm(tangents)[None]
        values = tangents[0].new_zeros(0)
        how = differentiation(training, "forward", start, first)
        missed = MissedBuffers(training, start, steps, self.skip, continued)
        step = _StepJVP(training, meta, learned, _basis(learned), how.over)
        with how.context(), second_derivative(training, how.over, self.skip) as second:
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
                if t == repeats_after(steps, self.skip):
                    again = training.evaluate(start, batch_at(batches, 0)).value
                    check_repeated(0, [values[0]], [again], rounding(values[:1].unbind())[0])
            value, cotangent = value_and_cotangent(outer_loss, after)
            notes = (
                *how.notes,
                *second.notes,
                left_out(meta, learned),
                missed.note(outer_loss, after, value),
            )
        zeros = tree.zeros_like(meta)  # of what overflowed in grads, tangents tell more
        grads = tree.replace(zeros, _contracted(tangents, cotangent, learned))
        info = unroll_info(after, value, zeros, values.unbind(), notes=notes)
        return Estimate(
            value, grads, ForwardCarry(after, tangents), _overflow(info | {"tangents": sizes}, grads)
        )


def learned_leaves(owner: str, learn: tuple[str, ...] | None, meta: Meta) -> leaf_names.Leaves:
    """Return the leaves of meta that `learn` names; all for None."""
    return tree.named(meta) if learn is None else leaf_names.named(owner, learn, meta)


def left_out(meta: Meta, learned: leaf_names.Leaves) -> str:
    """Say what is not learned, if there is any."""
    others = ", ".join(name for name in tree.named(meta) if name not in learned)
    return others and f"Zeros stand for the derivatives in what learn does not name: {others}."


forward = Forward()


@dataclass(frozen=True)
class _StepJVP:
    """One step forward: the carry after it, what it saw, and the tangents of the carry.

    ġ = H θ̇,    Ċ' = ∂advance/∂carry Ċ + ∂advance/∂g ġ + ∂advance/∂meta

    H θ̇ is the tangent of the gradient (`over="forward"`) or, where H is symmetric, a pullback of it.
    """

    training: Trains
    meta: Meta
    learned: leaf_names.Leaves
    basis: leaf_names.Leaves  # the direction of every learned number, one a row
    over: Over

    def __call__(self, carry: Any, batch: Batch, tangents: Tangents) -> tuple[Any, Seen, Tangents]:
        floats, rebuild = tree.partition(carry)
        d_params = rebuild(tangents).params
        seen, d_grads = self._evaluate(carry, batch, d_params)
        d_value = _dots(list(d_params.values()), [seen.grads[k] for k in d_params]).to(seen.value.dtype)

        def advance(
            learned: leaf_names.Leaves, floats: list[Tensor], grads: Params, value: Tensor
        ) -> tuple[Any, Any]:
            before, looked_at = with_constant_buffers(rebuild(floats)), Seen(value, grads, seen.buffers)
            after, _ = self.training.advance(tree.replace(self.meta, learned), before, looked_at)
            return tree.partition(after)[0], after

        here = (self.learned, floats, seen.grads, seen.value)
        tangents, after = _pushed(advance, here, (self.basis, tangents, d_grads, d_value))
        return after, seen, tangents

    def _evaluate(self, carry: Any, batch: Batch, d_params: Params) -> tuple[Seen, Params]:
        """Return what is seen, and the tangents of the gradient."""

        def evaluate(params: Params) -> tuple[Params, Seen]:
            seen = self.training.evaluate(tree.with_params(carry, params.values()), batch)
            return seen.grads, seen

        if self.over == "forward":
            d_grads, seen = _pushed(evaluate, (carry.params,), (d_params,))
            return seen, d_grads
        with stopped_gradients.recording() as record:
            pulling: Any = vjp(evaluate, carry.params, has_aux=True)
        _, pull, seen = pulling
        if not record:
            return seen, vmap(pull)(d_params)[0]
        # Where a gradient is stopped, its derivative J is not symmetric: the pullback of v ↦ Jᵀ v is u ↦ J u.
        transposed = vjp(lambda v: pull(v)[0], seen.grads)[1]
        return seen, vmap(transposed)(d_params)[0]


def _pushed(function: Callable[..., tuple[Any, Any]], here: tuple, along: tuple) -> tuple[Any, Any]:
    """Return the tangents of a function along each row, and what it returns besides."""
    push: Callable[..., Any] = vmap(lambda *along: jvp(function, here, along, has_aux=True)[1:])
    tangents, besides = push(*along)
    # Computed once: only tangents differ from row to row, and vmap shows one tensor as if there were many.
    return tangents, tree.map(lambda x: x[0], besides)


def _dots(rows: list[Tensor], x: list[Tensor]) -> Tensor:
    """Return ⟨row, x⟩ for each row."""
    products = [row.reshape(len(row), -1) @ leaf.flatten() for row, leaf in zip(rows, x, strict=True)]
    return torch.stack(products).sum(0)


def _basis(learned: leaf_names.Leaves) -> leaf_names.Leaves:
    """Return the direction of every learned number, one a row: the identity, cut into leaves."""
    numbers, start, basis = _numbers(learned), 0, {}
    for name, leaf in learned.items():
        identity = torch.eye(numbers, dtype=leaf.dtype, device=leaf.device)
        basis[name] = identity[:, start : start + leaf.numel()].reshape(numbers, *leaf.shape)
        start += leaf.numel()
    return basis


def _fitting(tangents: Tangents | tuple[()], carry: Any, learned: leaf_names.Leaves) -> Tangents:
    """Return the tangents to start from, zeros if there are none."""
    floats, _ = tree.partition(carry)
    shapes = [(_numbers(learned), *leaf.shape) for leaf in floats]
    if tangents and [tuple(d.shape) for d in tangents] != shapes:
        raise ValueError(
            f"This ForwardCarry has tangents for {len(tangents[0])} numbers, but {_numbers(learned)} are "
            f"learned ({', '.join(learned)}). Start again with forward.init(carry.carry)."
        )
    return list(tangents) or [leaf.new_zeros(shape) for leaf, shape in zip(floats, shapes, strict=True)]


def _numbers(learned: leaf_names.Leaves) -> int:
    return sum(leaf.numel() for leaf in learned.values())


def _contracted(tangents: Tangents, cotangent: Cotangent, learned: leaf_names.Leaves) -> leaf_names.Leaves:
    """Return ⟨∂value/∂carry, Ċ⟩ for every learned number, each in its place."""
    parts = _dots(tangents, cotangent).split([leaf.numel() for leaf in learned.values()])
    return {
        name: part.view(leaf.shape).to(leaf.dtype)
        for (name, leaf), part in zip(learned.items(), parts, strict=True)
    }


def _overflow(info: dict[str, Any], grads: Meta) -> dict[str, Any]:
    """Return info with a note if the hypergradient overflowed where training did not."""
    if tree.is_transforming() or info["overflow"] >= 0 or tree.all_finite(grads):
        return info
    steps = len(info["values"])
    step = next((t for t, size in enumerate(info["tangents"]) if not size.isfinite()), steps)
    note = (
        f"The hypergradient overflowed: ∂carry/∂meta is not finite after {step} of {steps} steps. "
        "Use a shorter horizon, a smaller lr, or evolution."
    )
    return info | {"overflow": torch.tensor(step), "notes": (*info["notes"], note)}
