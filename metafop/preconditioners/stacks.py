"""P(m) g and its pullback for many parameters at once: equal-sized small matrices are one batched product."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from metafop.preconditioners import gram
from metafop.preconditioners.dense import Dense, Spatial
from metafop.preconditioners.low_rank import LowRank
from metafop.types import Params, Preconditioner, Tree

_GRAM = (Dense, Spatial, LowRank)  # P is made of M Mᵀ, and M is one matrix


def factors(families: Mapping[str, Preconditioner], precond: Mapping[str, Tree], grads: Params) -> dict:
    """Return for each parameter what `turn` takes. It depends on m, and on the gradient's shape alone."""
    result: dict[str, Any] = {}
    whole: dict[str, Tensor] = {}
    for name, grad in grads.items():
        family, m = families[name], precond[name]
        if not isinstance(family, _GRAM):
            result[name] = m
        elif gram.is_whole(m, gram.count(m, grad)):
            whole[name] = m
        else:
            result[name] = gram.Factor(m, False)
    for name, p in _together(gram.product, whole).items():
        result[name] = gram.Factor(p, True)
    return result


def turn(family: Preconditioner, factor: Any, grad: Tensor) -> Tensor:
    """Return P g."""
    return family.turn(factor, grad) if isinstance(family, _GRAM) else family.apply(factor, grad)


def pullbacks(
    families: Mapping[str, Preconditioner], precond: Mapping[str, Tree], grads: Params, cotangents: Params
) -> dict[str, Tree]:
    """Return the derivative of ⟨cotangent, P(m) grad⟩ in the m of each parameter."""
    result: dict[str, Tree] = {}
    crosses: dict[str, Tensor] = {}
    for name, m in precond.items():
        family, grad, cotangent = families[name], grads[name], cotangents[name]
        if isinstance(family, _GRAM) and gram.is_crossed(m, gram.count(m, grad)):
            crosses[name] = gram.cross(gram.rows(m, grad), gram.rows(m, cotangent))
        else:
            result[name] = family.pullback(m, grad, cotangent)
    pulled = _together(gram.pullback_crossed, {name: precond[name] for name in crosses}, crosses)
    return {name: pulled[name] if name in pulled else result[name] for name in precond}


def _together(function: Callable[..., Tensor], *args: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `function` of the tensors under each name; those of one shape are stacked for it."""
    alike: dict[Any, list[str]] = {}
    for name, m in args[0].items():
        alike.setdefault((m.shape, m.dtype, m.device), []).append(name)
    result: dict[str, Tensor] = {}
    for names in alike.values():
        if len(names) == 1:
            result[names[0]] = function(*(arg[names[0]] for arg in args))
        else:
            stacked = function(*(torch.stack([arg[name] for name in names]) for arg in args))
            result.update(zip(names, stacked.unbind(), strict=True))
    return result
