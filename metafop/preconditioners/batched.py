"""P(m) g and its pullback for many parameters at once: equal-sized small matrices are one batched product."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from metafop.preconditioners import gram
from metafop.preconditioners.dense import Dense, Spatial
from metafop.preconditioners.low_rank import LowRank
from metafop.protocols import Preconditioner
from metafop.types import Params, Tree

_GRAM = (Dense, Spatial, LowRank)  # P is made of M Mᵀ, and M is one matrix; a subclass may change that


def preconditioner_functions(
    families: Mapping[str, Preconditioner], precond: Mapping[str, Tree], grads: Params
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return for each parameter what makes P g of g. It depends on m, and on the form of the gradient."""
    result: dict[str, Callable[[Tensor], Tensor]] = {}
    whole: dict[str, Tensor] = {}
    several: dict[str, int] = {}
    for name, grad in grads.items():
        m, family = precond[name], families[name]
        if type(family) not in _GRAM:
            result[name] = partial(family.apply, m)
            continue
        count = gram.count(m, grad)
        if gram.is_whole(m, count):
            whole[name], several[name] = m, gram.together(m.shape[-2], count)
        else:
            result[name] = family.preconditioner_function(gram.half(m), grad)  # pyright: ignore
    for name, p in _together(gram.product, several, whole).items():
        result[name] = families[name].preconditioner_function(gram.Factor(p), grads[name])  # pyright: ignore
    return result


def is_gram(family: Preconditioner) -> bool:
    """Return whether P g, for a g that is contiguous, surely is like g: of its shape, contiguous too."""
    return type(family) in _GRAM


def pullbacks(
    families: Mapping[str, Preconditioner], precond: Mapping[str, Tree], grads: Params, cotangents: Params
) -> dict[str, Tree]:
    """Return the derivative of ⟨cotangent, P(m) grad⟩ in the m of each parameter."""
    result: dict[str, Tree] = {}
    crosses: dict[str, Tensor] = {}
    several: dict[str, int] = {}
    for name, m in precond.items():
        family, grad, cotangent = families[name], grads[name], cotangents[name]
        if type(family) in _GRAM:
            count = gram.count(m, grad)
            if gram.is_crossed(m, count):
                several[name] = gram.together(m.shape[-2], count)
                crosses[name] = gram.cross(m, grad, cotangent, several[name])
            else:
                result[name] = gram.pullback_both(m, grad, cotangent)
        else:
            result[name] = family.pullback(m, grad, cotangent)
    ms = {name: precond[name] for name in crosses}
    result |= _together(gram.pullback_crossed, several, ms, crosses)
    return {name: result[name] for name in precond}


def _together(
    function: Callable[..., Tensor], several: dict[str, int], *args: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return `function(*args, several)` for each name; those of one shape are stacked for it."""
    alike: dict[Any, list[str]] = {}
    for name, m in args[0].items():
        alike.setdefault((several[name], m.shape, m.dtype, m.device), []).append(name)
    result: dict[str, Tensor] = {}
    for (count, *_), names in alike.items():
        if len(names) == 1:
            result[names[0]] = function(*(arg[names[0]] for arg in args), count)
        else:
            stacked = function(*(torch.stack([arg[name] for name in names]) for arg in args), count)
            result.update(zip(names, stacked.unbind(), strict=True))
    return result
