"""What the estimators over many steps share: what is refused, the outer loss, one step back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.func import grad_and_value, jvp, vjp

from metafop import checks, stopped_gradients, tree
from metafop.types import Batch, Batches, Carry, Meta, OuterLoss, Seen, Trains, Tree

Over = Literal["reverse", "forward"]
Check = Literal["repeat", "hessian", "buffers", "compiled"]
Skip = tuple[Check, ...]  # the checks that an estimator leaves out
Cotangent = list[Tensor]  # for each floating-point leaf of a carry


def horizon(training: Trains, meta: Meta, carry: Any, batches: Batches) -> int:
    """Return T, the number of steps, or refuse what cannot be unrolled."""
    if not hasattr(batches, "__len__") or not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"The batches are a {type(batches).__name__}, which cannot be asked twice for the same one. "
            "Pass a sequence, such as list(batches)."
        )
    if len(batches) == 0:
        raise ValueError("There are no batches, so no step to differentiate. Pass at least one.")
    if not isinstance(getattr(carry, "params", None), dict):
        raise TypeError(
            f"The carry is a {type(carry).__name__}, which holds no params. Pass what training.init(params) "
            "returns, or the carry of an earlier estimate of the same kind."
        )
    training.check(meta, carry)
    return len(batches)


def check_skip(owner: str, skip: Skip) -> None:
    """Refuse to skip checks that there are not."""
    if not isinstance(skip, tuple) or not set(skip) <= set(get_args(Check)):
        raise ValueError(
            f"{owner} skips a tuple of checks out of {get_args(Check)}, got skip={skip!r}. Pass such a tuple."
        )


@contextmanager
def estimating() -> Iterator[None]:
    """A context in which what torch cannot do is said in a sentence.

    Gradients are enabled, whatever the caller does: without, torch's fused LSTM leaves out what its
    derivative needs.
    """
    with torch.enable_grad():
        try:
            yield
        except RuntimeError as error:
            checks.explain(error)
            raise


def apart(x: Tree) -> Tree:
    """Return the tree cut off from what torch.autograd has recorded, unless a derivative is being taken.

    A loss may close over what requires a gradient, and from torch 2.14 on what is pulled back through batch
    norm requires one: either would keep the graph of every step.
    """
    if tree.is_differentiating():
        return x
    return tree.map(lambda leaf: leaf.detach() if tree.is_recorded(leaf) else leaf, x)


def batch_at(batches: Batches, t: int) -> Batch:
    try:
        return batches[t]
    except IndexError as error:
        raise ValueError(
            f"The batches run out at step {t}, but their len() promises {len(batches)}. "
            "Pass a sequence whose [t] gives a batch for every t below its len()."
        ) from error


def held(carry: Any) -> Any:
    """Return the carry with its buffers held constant: they are carried and never differentiated."""

    def hold(x: Any) -> Any:
        return x._replace(buffers=tree.map(torch.detach, x.buffers)) if has_buffers(x) else x

    return tree.map(hold, carry, is_leaf=has_buffers)


def outer_value(outer_loss: OuterLoss, carry: Any) -> Tensor:
    """Return the outer loss, or refuse what is no scalar."""
    value = outer_loss(carry)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"An outer loss returns a floating-point tensor, got {kind}. Return one.")
    if value.dim() != 0:
        raise ValueError(
            f"An outer loss returns a scalar, got a tensor of shape {tuple(value.shape)}. Take its mean()."
        )
    return value


def check_dependence(depends: bool) -> None:
    """Refuse an outer loss that does not depend on the carry."""
    if not depends:
        raise ValueError(
            "The outer loss does not depend on what training moves, so that its hypergradient would be zero. "
            "Compute it from the params of the carry that it is given."
        )


def outer_pull(outer_loss: OuterLoss, carry: Any) -> tuple[Tensor, Cotangent]:
    """Return the outer loss of a carry, and its derivative in each floating-point leaf."""
    floats, rebuild = tree.partition(carry)

    def value(floats: list[Tensor]) -> Tensor:
        value = outer_value(outer_loss, held(rebuild(floats)))
        check_dependence(tree.is_tracked(value))
        return value

    cotangent, loss = grad_and_value(value)(floats)
    return apart((loss, cotangent))


@dataclass(frozen=True)
class StepBack:
    """One step back: the derivatives of ⟨cotangent, carry after the step⟩ in meta and in the carry before it.

    λ_t = (∂advance/∂carry)ᵀ λ_(t+1) + H (∂advance/∂g)ᵀ λ_(t+1): a pullback of `advance`, which is cheap, and
    one Hessian-vector product, by differentiating the gradient backward (`over="reverse"`) or forward. If
    what the step saw was kept, a compiled step does not compute the gradient again. (docs/math.md, 19)
    Returned besides is what the step sees when it is taken again.

    `looks` says whether `advance` looks at the value of the loss: a custom training may.
    """

    training: Trains
    over: Over = "reverse"
    looks: bool = False

    def __call__(
        self, meta: Meta, carry: Any, batch: Batch, cotangent: Cotangent, seen: Seen | None = None
    ) -> tuple[Meta, Cotangent, Seen]:
        given = (meta, held(carry), batch, cotangent, seen)
        if self.over == "forward":
            with stopped_gradients.recording() as record:
                pulled = self._over_forward(*given)
            if record:  # where a gradient is stopped, its derivative is not symmetric
                pulled = self._over_reverse(*given)
        else:
            pulled = self._over_reverse(*given)
        d_meta, d_floats, d_params, again = pulled
        floats, rebuild = tree.partition(carry)
        through_params = tree.pull(lambda floats: list(rebuild(floats).params.values()), floats, d_params)
        return apart((d_meta, tree.add(d_floats, through_params), again))

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
        d_grads, d_value = d_seen if self.looks else (d_seen, None)
        grads = partial(gradients, self.training, carry, batch)
        along = [d_grads[name] for name in carry.params]
        d_params = jvp(grads, (list(carry.params.values()),), (along,))[1]
        if d_value is not None:
            first = [(seen or again).grads[name] for name in carry.params]
            d_params = [h + d_value * g for h, g in zip(d_params, first, strict=True)]
        return d_meta, d_floats, d_params, again

    def _evaluate(self, carry: Any, batch: Batch) -> Callable[[list[Tensor]], tuple[Any, Seen]]:
        """Return what is differentiated: what `advance` looks at, as a function of the parameters."""
        params = list(carry.params.values())

        def evaluate(now: list[Tensor]) -> tuple[Any, Seen]:
            seen = self.training.evaluate(tree.swap(carry, params, now), batch)
            return ((seen.grads, seen.value) if self.looks else seen.grads), seen

        return evaluate

    def _pull_advance(
        self, meta: Meta, carry: Any, seen: Seen, cotangent: Cotangent
    ) -> tuple[Meta, Cotangent, Any]:
        floats, rebuild = tree.partition(carry)

        def advance(meta: Meta, floats: list[Tensor], looked_at: Any) -> list[Tensor]:
            grads, value = looked_at if self.looks else (looked_at, seen.value)
            after, _ = self.training.advance(meta, rebuild(floats), Seen(value, grads, seen.buffers))
            return tree.partition(after)[0]

        looked_at = (seen.grads, seen.value) if self.looks else seen.grads
        return vjp(advance, meta, floats, looked_at)[1](cotangent)


def looks_at_value(training: Trains, meta: Meta, carry: Any) -> bool:
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


def gradients(training: Trains, carry: Any, batch: Batch, params: list[Tensor]) -> list[Tensor]:
    """Return the gradients at other parameters than those of the carry."""
    seen = training.evaluate(tree.swap(carry, list(carry.params.values()), params), batch)
    return [seen.grads[k] for k in carry.params]


def forward_fails(training: Trains, carry: Any, batch: Batch) -> str:
    """Return why the gradient cannot be differentiated forward, or nothing if it can."""
    carry = held(carry)
    params = list(carry.params.values())
    try:
        jvp(partial(gradients, training, carry, batch), (params,), (tree.zeros_like(params),))
    except (NotImplementedError, RuntimeError) as error:
        if "forward" not in str(error):
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        return f"Differentiated in reverse over reverse, because forward over reverse failed: {reason}."
    return ""


def has_buffers(x: Any) -> bool:
    return isinstance(x, Carry | Seen)
