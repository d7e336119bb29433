"""Trees cut off from derivatives: from torch.autograd's record, and buffers from every derivative."""

from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.types import Carry, Seen, Tree


def detached(x: Tree) -> Tree:
    """Return the tree cut off from what torch.autograd has recorded, unless a derivative is being taken.

    A loss may close over what requires a gradient, and from torch 2.14 on what is pulled back through batch
    norm requires one: either would keep the graph of every step.
    """
    if tree.is_differentiating():
        return x
    return tree.map(
        lambda leaf: leaf.detach() if isinstance(leaf, Tensor) and tree.is_recorded(leaf) else leaf, x
    )


def with_constant_buffers(carry: Any) -> Any:
    """Return the carry with its buffers as constants: they are carried and never differentiated."""

    def constant(x: Any) -> Any:
        return x._replace(buffers=tree.map(torch.detach, x.buffers)) if has_buffers(x) else x

    return tree.map(constant, carry, is_leaf=has_buffers)


def has_buffers(x: Any) -> bool:
    return isinstance(x, Carry | Seen)
