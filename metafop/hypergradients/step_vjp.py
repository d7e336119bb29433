"""The vector-Jacobian product of one step: the mathematical heart of every estimator in reverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.func import vjp

from metafop import stopped_gradients, tree
from metafop.hypergradients.graphs import detached, with_constant_buffers
from metafop.hypergradients.inputs import Inputs, inputs_of
from metafop.hypergradients.locked_jvp import jvp
from metafop.hypergradients.outer_loss import Cotangent
from metafop.protocols import Trains
from metafop.types import Batch, Given, Meta, Seen

Over = Literal["reverse", "forward"]  # how the gradient is differentiated


@dataclass(frozen=True)
class StepVJP:
    """The derivatives of ⟨cotangent, carry after the step⟩ in meta and in the carry before the step.

    d = (∂advance/∂g)ᵀ λ_(t+1),    λ_t = (∂advance/∂carry)ᵀ λ_(t+1) + H d    (docs/math.md, 19)
    ∂meta = (∂advance/∂meta)ᵀ λ_(t+1) + (∂g/∂leaves)ᵀ d                     (docs/math.md, 28)

    This is a pullback of `advance`, which is cheap, and one of the gradient: a Hessian-vector product, and
    with it the derivative in the leaves of the loss. `over` says whether the gradient is differentiated in
    reverse or forward. Returned besides is what the step sees when it is taken again. If what it saw before
    is given (`seen`), a compiled step does not compute the gradient again.

    `depends_on_value` says whether `advance` reads the value of the loss, as a custom training may.
    """

    training: Trains
    over: Over = "reverse"
    depends_on_value: bool = False

    def __call__(
        self, meta: Meta, carry: Any, batch: Batch, cotangent: Cotangent, seen: Seen | None = None
    ) -> tuple[Meta, Cotangent, Seen]:
        floats, rebuild = tree.partition((meta, carry))
        inputs = inputs_of(meta, with_constant_buffers(carry))
        given = (inputs, batch, cotangent, seen)
        pulled = self._over_forward(*given) if self.over == "forward" else None
        d_floats, d_inputs, again = pulled or self._over_reverse(*given)
        for place, d in zip(inputs.places, d_inputs, strict=True):
            d_floats[place] = d_floats[place] + d
        count = len(tree.leaves(meta))
        d_meta = rebuild([*d_floats[:count], *floats[count:]])[0]
        return detached((d_meta, d_floats[count:], again))

    def _over_reverse(
        self, inputs: Inputs, batch: Batch, cotangent: Cotangent, seen: Seen | None
    ) -> tuple[list[Tensor], list[Tensor], Seen]:
        pulling: Any = vjp(self._evaluate(inputs, batch), inputs.tensors, has_aux=True)
        _, pull, again = pulling
        d_floats, d_read = self._pull_advance(inputs, _kept(seen, again), cotangent)
        (d_inputs,) = pull(d_read)
        return d_floats, d_inputs, again

    def _over_forward(
        self, inputs: Inputs, batch: Batch, cotangent: Cotangent, seen: Seen | None
    ) -> tuple[list[Tensor], list[Tensor], Seen] | None:
        """H d_grads + g d_value, the Hessian-vector product by differentiating g forward.

        The derivative in leaves of the loss stays a pullback: forward it would take a product for each
        number. None where the derivative of g is not symmetric, or not that of one loss.
        """
        params = inputs.params
        with stopped_gradients.recording() as record:
            again = self.training.evaluate(*inputs.put(()), batch)
            d_floats, d_read = self._pull_advance(inputs, _kept(seen, again), cotangent)
            d_grads, _, *d_value = d_read

            def grads(params: list[Tensor]) -> list[Tensor]:
                return gradients(self.training, inputs, batch, params)

            if again.cotangent:
                return None
            d_params = jvp(grads, (params,), (list(d_grads.values()),))[1]
        if record:  # a gradient is stopped
            return None
        if d_value:
            first = _kept(seen, again).grads.values()
            d_params = [h + d_value[0] * g for h, g in zip(d_params, first, strict=True)]
        if leaves := inputs.tensors[len(params) :]:
            evaluate = self._evaluate(inputs, batch)
            pulling: Any = vjp(lambda leaves: evaluate([*params, *leaves]), leaves, has_aux=True)
            d_params = [*d_params, *pulling[1](d_read)[0]]
        return d_floats, d_params, again

    def _evaluate(self, inputs: Inputs, batch: Batch) -> Callable[[list[Tensor]], tuple[Any, Seen]]:
        """Return what is differentiated: what `advance` reads, as a function of the inputs."""

        def evaluate(tensors: list[Tensor]) -> tuple[Any, Seen]:
            seen = self.training.evaluate(*inputs.put(tensors), batch)
            return self._read(seen), seen

        return evaluate

    def _read(self, seen: Seen) -> Any:
        """Return what `advance` reads of what was seen, but for buffers."""
        value = (seen.value,) if self.depends_on_value else ()
        return (seen.grads, seen.cotangent, *value)

    def _pull_advance(self, inputs: Inputs, seen: Seen, cotangent: Cotangent) -> tuple[list[Tensor], Any]:
        floats, rebuild = tree.partition((inputs.meta, inputs.carry))

        def advance(floats: list[Tensor], read: Any) -> list[Tensor]:
            grads, cotangent, *value = read
            looked_at = seen._replace(
                value=value[0] if value else seen.value, grads=grads, cotangent=cotangent
            )
            meta, carry = rebuild(floats)
            after, _ = self.training.advance(meta, with_constant_buffers(carry), looked_at)
            return tree.partition(after)[0]

        return vjp(advance, floats, self._read(seen))[1](cotangent)


def _kept(seen: Seen | None, again: Seen) -> Seen:
    """Return what a step saw before if that is given; its batch is that of the step taken again."""
    return again if seen is None else seen._replace(batch=again.batch)


def gradients(training: Trains, inputs: Inputs, batch: Batch, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients where the inputs are these; and those of a validation loss, if there is one."""
    seen = training.evaluate(*inputs.put(tensors), batch)
    return [part[k] for part in (seen.grads, seen.cotangent) if part for k in inputs.carry.params]


def depends_on_value(training: Trains, meta: Meta, carry: Any) -> bool:
    """Return whether the carry after a step depends on the value of the loss, besides its gradient."""
    found = []
    zero = next(iter(carry.params.values())).new_zeros(())

    def after(value: Tensor) -> Tensor:
        zeros = tree.zeros_like(carry.params)
        validated = any(last.cotangent for last in tree.instances(carry, Seen))
        batches = [given.batch for given in tree.instances(carry, Given)]
        seen = Seen(value, zeros, carry.buffers, zeros if validated else (), *batches[:1])
        floats, _ = tree.partition(training.advance(meta, carry, seen)[0])
        found.append(any(tree.is_tracked(leaf) for leaf in floats))
        return value

    vjp(after, zero)
    return found[0]
