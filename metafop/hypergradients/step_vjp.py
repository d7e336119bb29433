"""The vector-Jacobian product of one step: the mathematical heart of every estimator in reverse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.func import vjp

from metafop import stopped_gradients, tree
from metafop.hypergradients.graphs import detached, with_constant_buffers
from metafop.hypergradients.locked_jvp import jvp
from metafop.hypergradients.outer_loss import Cotangent
from metafop.types import Batch, Meta, Seen, Trains

Over = Literal["reverse", "forward"]  # how the gradient is differentiated


@dataclass(frozen=True)
class StepVJP:
    """The derivatives of ⟨cotangent, carry after the step⟩ in meta and in the carry before the step.

    λ_t = (∂advance/∂carry)ᵀ λ_(t+1) + H (∂advance/∂g)ᵀ λ_(t+1)    (docs/math.md, 19)

    This is a pullback of `advance`, which is cheap, and one Hessian-vector product, by differentiating the
    gradient in reverse or forward (`over`). Returned besides is what the step sees when it is taken again. If
    what it saw before is given (`seen`), a compiled step does not compute the gradient again.

    `depends_on_value` says whether `advance` reads the value of the loss, as a custom training may.
    """

    training: Trains
    over: Over = "reverse"
    depends_on_value: bool = False

    def __call__(
        self, meta: Meta, carry: Any, batch: Batch, cotangent: Cotangent, seen: Seen | None = None
    ) -> tuple[Meta, Cotangent, Seen]:
        given = (meta, with_constant_buffers(carry), batch, cotangent, seen)
        if self.over == "forward":
            with stopped_gradients.recording() as record:
                pulled = self._over_forward(*given)
            if record:  # where a gradient is stopped, its derivative is not symmetric
                pulled = self._over_reverse(*given)
        else:
            pulled = self._over_reverse(*given)
        d_meta, d_floats, d_params, again = pulled
        floats, rebuild = tree.partition(carry)
        for place, d_param in zip(tree.param_places(len(floats), rebuild), d_params, strict=True):
            d_floats[place] = d_floats[place] + d_param
        return detached((d_meta, d_floats, again))

    def _over_reverse(
        self, meta: Meta, carry: Any, batch: Batch, cotangent: Cotangent, seen: Seen | None
    ) -> tuple[Meta, Cotangent, list[Tensor], Seen]:
        pulling: Any = vjp(self._evaluate(carry, batch), list(carry.params.values()), has_aux=True)
        _, pull, again = pulling
        d_meta, d_floats, d_seen = self._pull_advance(meta, carry, seen or again, cotangent)
        (d_params,) = pull(d_seen)
        return d_meta, d_floats, d_params, again

    def _over_forward(
        self, meta: Meta, carry: Any, batch: Batch, cotangent: Cotangent, seen: Seen | None
    ) -> tuple[Meta, Cotangent, list[Tensor], Seen]:
        """H d_grads + g d_value, the Hessian-vector product by differentiating g forward."""
        again = self.training.evaluate(carry, batch)
        d_meta, d_floats, d_seen = self._pull_advance(meta, carry, seen or again, cotangent)
        d_grads, d_value = d_seen if self.depends_on_value else (d_seen, None)
        grads = partial(gradients, self.training, carry, batch)
        along = [d_grads[name] for name in carry.params]
        d_params = jvp(grads, (list(carry.params.values()),), (along,))[1]
        if d_value is not None:
            first = [(seen or again).grads[name] for name in carry.params]
            d_params = [h + d_value * g for h, g in zip(d_params, first, strict=True)]
        return d_meta, d_floats, d_params, again

    def _evaluate(self, carry: Any, batch: Batch) -> Callable[[list[Tensor]], tuple[Any, Seen]]:
        """Return what is differentiated: what `advance` reads, as a function of the parameters."""

        def evaluate(params: list[Tensor]) -> tuple[Any, Seen]:
            seen = self.training.evaluate(tree.with_params(carry, params), batch)
            return ((seen.grads, seen.value) if self.depends_on_value else seen.grads), seen

        return evaluate

    def _pull_advance(
        self, meta: Meta, carry: Any, seen: Seen, cotangent: Cotangent
    ) -> tuple[Meta, Cotangent, Any]:
        floats, rebuild = tree.partition(carry)

        def advance(meta: Meta, floats: list[Tensor], read: Any) -> list[Tensor]:
            grads, value = read if self.depends_on_value else (read, seen.value)
            after, _ = self.training.advance(meta, rebuild(floats), Seen(value, grads, seen.buffers))
            return tree.partition(after)[0]

        read = (seen.grads, seen.value) if self.depends_on_value else seen.grads
        return vjp(advance, meta, floats, read)[1](cotangent)


def gradients(training: Trains, carry: Any, batch: Batch, params: list[Tensor]) -> list[Tensor]:
    """Return the gradients at other parameters than those of the carry."""
    seen = training.evaluate(tree.with_params(carry, params), batch)
    return [seen.grads[k] for k in carry.params]


def depends_on_value(training: Trains, meta: Meta, carry: Any) -> bool:
    """Return whether the carry after a step depends on the value of the loss, besides its gradient."""
    found = []
    zero = next(iter(carry.params.values())).new_zeros(())

    def after(value: Tensor) -> Tensor:
        seen = Seen(value, tree.zeros_like(carry.params), carry.buffers)
        floats, _ = tree.partition(training.advance(meta, carry, seen)[0])
        found.append(any(tree.is_tracked(leaf) for leaf in floats))
        return value

    vjp(after, zero)
    return found[0]
