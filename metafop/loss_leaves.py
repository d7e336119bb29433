"""Leaves of the loss: the part of meta that a loss is given, each leaf in its range."""

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from metafop import patterns, tree
from metafop.functional import takes_leaves
from metafop.optimizers import Free, Scheduled
from metafop.optimizers.hyper import extremes
from metafop.protocols import Domain, Optimizer
from metafop.types import Loss, Params, Tree

_FREE = Free()


def made(
    loss: Loss, optimizer: Optimizer, domains: Mapping[str, Domain], values: Tree, params: Params
) -> Tree:
    """Return the leaves that a `loss` is to be given, as precise as its parameters, or refuse what cannot be.

    optimizer: where it is `Scheduled` and names some, these have an entry for each step.
    domains: of the leaves, by pattern of their names.
    values: a tree of numbers and tensors; None where there are none.
    params: what is trained, by name.
    """
    _check_loss(loss, values)
    if values is None:
        return ()
    dtype = reduce(torch.promote_types, [p.dtype for p in params.values()], torch.float32)
    device = next(iter(params.values())).device
    leaves = tree.map_named(lambda name, x: _tensor(name, x).to(device=device, dtype=dtype), values)
    named = tree.named(leaves)
    if isinstance(optimizer, Scheduled):
        _check_scheduled(optimizer, named)
        leaves = tree.map_named(optimizer.leaf, leaves)
    for pattern in patterns.unused(domains, named):
        raise ValueError(
            f"Training has a domain in loss_domains for {pattern!r}, which comes first for none of the "
            f"leaves {sorted(named)}. Correct the pattern, or drop it."
        )
    for name, leaf in tree.named(leaves).items():
        _check_range(name, leaf, domain(domains, name))
    return leaves


def domain(domains: Mapping[str, Domain], name: str) -> Domain:
    """Return the range of a leaf, by the name that it has within the leaves of the loss."""
    pattern = patterns.first(tuple(domains), name)
    return _FREE if pattern is None else domains[pattern]


def _check_loss(loss: Loss, values: Tree) -> None:
    takes = takes_leaves(loss, 3)
    if values is not None and not takes:
        raise TypeError(
            f"init_meta got leaves for the loss, {_described(values)}, but the loss takes three arguments. "
            "Give it a fourth, without a default value, that it reads them from; with functional.plain or "
            "from_module a third: loss(params, batch, leaves)."
        )
    if values is None and takes:
        raise TypeError(
            "The loss takes leaves of meta as its last argument, and init_meta got none. Pass "
            "init_meta(params, loss={...}, lr=...); loss=() for none."
        )


def _described(values: Tree) -> str:
    return str(sorted(values)) if isinstance(values, dict) else type(values).__name__


def _tensor(name: str, x: Any) -> Tensor:
    if isinstance(x, bool) or not isinstance(x, Tensor | float | int):
        raise TypeError(
            f"The leaf {name!r} of the loss is {x!r}, a {type(x).__name__}, and only tensors and numbers can "
            "be learned. Pass a tensor; what is not learned belongs into the batch."
        )
    if not isinstance(x, Tensor):
        return torch.tensor(float(x), dtype=torch.float64)
    if not x.is_floating_point():
        raise TypeError(
            f"The leaf {name!r} of the loss is {x.dtype}, in which nothing can be derived. Pass its float(); "
            "an index or a label that is not learned belongs into the batch."
        )
    return x


def _check_scheduled(optimizer: Scheduled, named: Mapping[str, Tensor]) -> None:
    for field in optimizer.leaf_fields:
        if not any(optimizer.is_scheduled(name, field) for name in named):
            raise ValueError(
                f"{optimizer} schedules {field!r}, and the loss has the leaves "
                f"{sorted(f'loss.{name}' for name in named)}. Name one of these, or the start of one."
            )


def _check_range(name: str, leaf: Tensor, domain: Domain) -> None:
    for place, number in extremes(name, leaf):
        if not domain.holds(number):
            raise ValueError(
                f"The leaf {place!r} of the loss is {number:g}, and its domain takes values {domain.says}. "
                "Pass a value in that range, or another domain in Training(loss_domains=...)."
            )
