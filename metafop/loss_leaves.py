"""Leaves of the loss: the part of meta that a loss is given, each leaf in its range."""

import reprlib
from collections.abc import Mapping, Sequence
from functools import reduce
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

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
    dtype = reduce(torch.promote_types, [p.dtype for p in params.values()], torch.float32)
    device = next(iter(params.values())).device
    names: list[str] = []

    def leaf(name: str, x: Any) -> Tensor:
        names.append(name)
        return _tensor(_called(name), x).to(device=device, dtype=dtype).contiguous()

    leaves = () if values is None else tree.map_named(leaf, values)
    _check_names(names, optimizer, domains)
    if isinstance(optimizer, Scheduled):
        leaves = tree.map_named(optimizer.leaf, leaves)
    for name, x in tree.named(leaves).items():
        _check_range(_called(name), x, domain(domains, name))
    return leaves


def domain(domains: Mapping[str, Domain], name: str) -> Domain:
    """Return the range of a leaf, by the name that it has within the leaves of the loss."""
    pattern = patterns.first(tuple(domains), name)
    return _FREE if pattern is None else domains[pattern]


def _called(name: str) -> str:
    """Return the name that a leaf has in meta."""
    return f"loss.{name}" if name else "loss"


def _check_loss(loss: Loss, values: Tree) -> None:
    takes = takes_leaves(loss, 3)
    if values is not None and tree.leaves(values) and not takes:
        raise TypeError(
            f"init_meta got leaves for the loss, {_described(values)}, which has no argument for them. Give "
            "it one more, without a default value: loss(params, batch, leaves) for functional.plain, "
            "loss(model, batch, leaves) for from_module, loss(params, buffers, batch, leaves) for Training."
        )
    if values is None and takes:
        raise TypeError(
            "The loss takes leaves of meta as its last argument, and init_meta got none. Pass "
            "init_meta(params, loss={...}, lr=...); loss=() for none."
        )


def _described(values: Tree) -> str:
    return str([*map(str, values)]) if isinstance(values, dict) else type(values).__name__


def _tensor(name: str, x: Any) -> Tensor:
    if isinstance(x, bool) or not isinstance(x, Tensor | Real):
        raise TypeError(
            f"The leaf {name} is {reprlib.repr(x)}, a {type(x).__name__}, and only tensors and numbers can "
            "be learned. Pass a tensor; what is not learned belongs into the batch."
        )
    if not isinstance(x, Tensor):
        return torch.tensor(float(x), dtype=torch.float64)
    if not x.is_floating_point():
        raise TypeError(
            f"The leaf {name} is {x.dtype}, in which nothing can be derived. Pass real floating-point "
            "numbers; an index or a label that is not learned belongs into the batch."
        )
    if isinstance(x, nn.Parameter):
        raise TypeError(
            f"The leaf {name} is an nn.Parameter, which would record the history of every step. "
            "Pass its detach()."
        )
    if not x.numel():
        raise ValueError(
            f"The leaf {name} has the shape {tuple(x.shape)}, and no number to learn. Leave it out."
        )
    return x


def _check_names(names: Sequence[str], optimizer: Optimizer, domains: Mapping[str, Domain]) -> None:
    """Refuse leaves that share a name, and domains and schedules of leaves that there are not."""
    called = [_called(name) for name in names]
    if len(set(names)) < len(names):
        twice = sorted({name for name in called if called.count(name) > 1})
        raise ValueError(f"Leaves of the loss share the names {twice}. Rename a key that has a dot in it.")
    for pattern in patterns.unused(domains, names):
        raise ValueError(
            f"Training has a domain in loss_domains for {pattern!r}, which comes first for none of the "
            f"leaves {sorted(names)}. Correct the pattern, or drop it."
        )
    if isinstance(optimizer, Scheduled):
        for field in optimizer.leaf_fields:
            if not any(optimizer.is_scheduled(name, field) for name in names):
                raise ValueError(
                    f"{optimizer} schedules {field!r}, and the leaves of the loss are {sorted(called)}. Name "
                    "one of these, or what several start with."
                )


def _check_range(name: str, leaf: Tensor, domain: Domain) -> None:
    for place, number in extremes(name, leaf):
        if not domain.holds(number):
            raise ValueError(
                f"The leaf {place} is {number:g}, and its domain takes values {domain.says}. "
                "Pass a value in that range, or another domain in Training(loss_domains=...)."
            )
