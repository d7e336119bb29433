"""How images lie in memory: channels last, convolutions and their derivatives are faster on a CPU."""

from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.protocols import Trains
from metafop.types import Batch, Meta


def channels_last(leaves: list[Any]) -> list[Any]:
    """Return the same batch, its images with the channels of a pixel side by side."""
    return [x.contiguous(memory_format=torch.channels_last) if _is_image(x) else x for x in leaves]


def takes_channels_last(training: Trains, meta: Meta, carry: Any, batch: Batch) -> bool:
    """Return whether there are images and kernels, and the model takes the images so.

    A `view` may not, and to `as_strided` they are other images.
    """
    leaves, structure = tree.flatten(batch)
    if not any(map(_is_image, leaves)) or not any(param.dim() == 4 for param in carry.params.values()):
        return False
    try:
        seen = training.evaluate(meta, carry, tree.unflatten(channels_last(leaves), structure))
    except Exception:  # any fault that is not the layout's shows again when the batch is taken as it is
        return False
    as_it_is = training.evaluate(meta, carry, batch)
    difference = tree.map(torch.sub, (seen.value, seen.grads), (as_it_is.value, as_it_is.grads))
    size = tree.norm((as_it_is.value, as_it_is.grads))
    return not bool(tree.norm(difference) > torch.finfo(size.dtype).eps ** 0.5 * size)


def _is_image(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point() and x.device.type == "cpu"
