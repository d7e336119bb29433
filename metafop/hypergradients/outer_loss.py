"""The outer loss of an unroll: its value and its derivative in the last carry."""

import inspect
from typing import Any, NamedTuple

from torch import Tensor
from torch.func import grad, grad_and_value

from metafop import tree
from metafop.functional import takes_leaves
from metafop.hypergradients.graphs import detached, with_constant_buffers
from metafop.types import Meta, OuterLoss

Cotangent = list[Tensor]  # one tensor for each floating-point leaf of a carry


class Outer(NamedTuple):
    """The outer loss: its value, its derivative in the carry's floating-point leaves, and that in meta."""

    value: Tensor
    cotangent: Cotangent
    d_meta: Meta


def value_of(outer_loss: OuterLoss, meta: Meta, carry: Any) -> Tensor:
    """Return the outer loss, or refuse what is no function of a carry, or no scalar."""
    _check_signature(outer_loss)
    value = outer_loss(carry, meta) if reads_meta(outer_loss) else outer_loss(carry)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"An outer loss returns a floating-point tensor, got {kind}. Return one.")
    if value.dim() != 0:
        raise ValueError(
            f"An outer loss returns a scalar, got a tensor of shape {tuple(value.shape)}. Take its mean()."
        )
    return value


def reads_meta(outer_loss: OuterLoss) -> bool:
    """Return whether the outer loss is a function of a carry and of meta."""
    return takes_leaves(outer_loss, 1)


def _check_signature(outer_loss: OuterLoss) -> None:
    if reads_meta(outer_loss):
        return
    try:
        inspect.signature(outer_loss).bind(None)
    except TypeError:
        raise TypeError(
            f"An outer loss is a function of a carry, or of a carry and meta, got {outer_loss!r}, which is "
            "not. Write for example lambda carry: loss(carry.params, carry.buffers, batch)[0]."
        ) from None
    except ValueError:  # it has no signature to look at
        return


def check_dependence(depends: bool) -> None:
    """Refuse an outer loss that does not depend on the carry."""
    if not depends:
        raise ValueError(
            "The outer loss does not depend on what training moves, so that nothing of training is in its "
            "derivative. Compute it from the params of the carry that it is given."
        )


def differentiated(outer_loss: OuterLoss, meta: Meta, carry: Any) -> Outer:
    """Return the outer loss of a carry, and its derivatives."""
    floats, rebuild = tree.partition(carry)

    def value(floats: list[Tensor]) -> Tensor:
        value = value_of(outer_loss, meta, with_constant_buffers(rebuild(floats)))
        check_dependence(tree.is_tracked(value))
        return value

    cotangent, loss = grad_and_value(value)(floats)
    return detached(Outer(loss, cotangent, _in_meta(outer_loss, meta, carry)))


def check_reads_carry(outer_loss: OuterLoss, meta: Meta, carry: Any) -> None:
    """Refuse an outer loss that reads meta and nothing else."""
    if reads_meta(outer_loss):
        differentiated(outer_loss, meta, carry)


def _in_meta(outer_loss: OuterLoss, meta: Meta, carry: Any) -> Meta:
    """Return the derivative of an outer loss that reads meta in it, the carry held; zeros for any other."""
    if not reads_meta(outer_loss):
        return tree.zeros_like(meta)
    return grad(lambda meta: value_of(outer_loss, meta, with_constant_buffers(carry)))(meta)
