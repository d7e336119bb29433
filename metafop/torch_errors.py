"""Errors of torch that are known, said again in a sentence with the remedy."""

import re
from collections.abc import Mapping

from torch import Tensor

from metafop import tree
from metafop.types import Params, Tree


def explain_devices(error: Exception, params: Params, given: Mapping[str, Tree]) -> None:
    """Raise a sentence in place of torch's error about devices, if a loss was given tensors on two.

    given: what it was given, by name. A single number on the CPU goes with any device.
    """
    device = next(iter(params.values())).device
    if not re.search("device|should be the same", str(error)):
        return
    for name, x in given.items():
        for leaf in tree.leaves(x):
            if isinstance(leaf, Tensor) and leaf.device != device and leaf.dim():
                raise ValueError(
                    f"The {name} has a tensor of shape {tuple(leaf.shape)} on {leaf.device}, and the "
                    f"parameters are on {device}. Move it there: .to({str(device)!r})."
                ) from error


def explain(error: Exception) -> None:
    """Raise a sentence in place of torch's error, if it is a known one."""
    for pattern, sentence in _KNOWN.items():
        if found := re.search(pattern, str(error)):
            kind = next((kind for word, kind in _KINDS.items() if word in pattern), NotImplementedError)
            raise kind(sentence.format(*found.groups())) from error


_KINDS = {"index": IndexError, "device": ValueError}

# What torch says when torch.func cannot do something, and what is to be done about it.
_KNOWN = {
    r"expected scalar type (\w+) but found (\w+)": (
        "The loss mixes {0} with {1}. Convert what it is given to one type; if that is done, use adjoint: "
        "torch cannot push batch norm's derivative forward under autocast."
    ),
    r"on the same device|not on the expected device|different devices": (
        "The loss, or the outer loss, computes with tensors on two devices, such as a batch that it closes "
        "over. Move them to that of the parameters, by .to(device)."
    ),
    r"derivative for '?(?:aten::)?_?(\w+?)(?:_backward)?'? is not implemented": (
        "torch has no derivative, or no second one, of {0}, which the loss uses and an unrolled "
        "hypergradient needs. Write it out in other operations (an embedding bag is a mean of embeddings, "
        "cdist the norm of x[:, None] - y), or use evolution."
    ),
    r"function '?(\w+?)'? is not differentiable with respect to argument '?(\w+?)'?\.": (
        "torch has no derivative of {0} in its argument {1}, which the loss computes from the parameters. "
        "To stop a gradient there makes no difference to the derivative of a run. Write {0} out in other "
        "operations, or use evolution."
    ),
    r"is a view and is being modified inplace": (
        "The loss writes in place into one of several views that unbind, split or chunk return, which torch "
        "cannot differentiate. Take the parts by indexing, x[0], or compute new tensors."
    ),
    r"saved tensor hooks": (
        "The loss uses torch.utils.checkpoint, or other hooks on saved tensors, which torch.func cannot "
        "follow. Call the module without it: an Adjoint keeps no graph longer than a step."
    ),
    r"must override the setup_context": (
        "The loss uses a torch.autograd.Function without setup_context, which torch.func cannot follow; "
        "torch.utils.checkpoint with use_reentrant=True and full backward hooks of modules are such. Give "
        "the function a setup_context, or write it in torch's operations."
    ),
    r"Cannot access data pointer of Tensor that doesn't have storage": (
        "The loss uses an operation that reads memory behind torch.func, such as packing sequences "
        "(PackedSequence) or numpy(). Pad sequences and mask what is beyond their end, and compute with "
        "torch's operations."
    ),
    r"index (\S+) is out of bounds for dimension (\d+) with size (\d+)": (
        "The loss takes the index {0} of a tensor of size {2} in dimension {1}, as for an example that has "
        "no weight. Pass indices from 0 to one below the size, and leaves as long as the data."
    ),
    r"^index out of (?:range|bounds)|^out of range: tried to access index": (
        "The loss takes an index out of range, as for an example that has no weight. Pass indices from 0 to "
        "one below the size, and leaves as long as the data."
    ),
    r"random operation while in randomness error mode": (
        "The loss draws random numbers, which vmap refuses: they would be others whenever a step is taken "
        "again. Pass seeded=True to functional.from_module or functional.plain."
    ),
    r"escaped\?|backward through the graph a second time": (
        "The loss keeps a tensor from one call to the next in an attribute or a variable, which torch.func "
        "cannot follow. Make it a buffer (register_buffer), or return it with the buffers."
    ),
    r"Tensor\.requires_grad_\(\)|\.data` inside functorch|backward\(\) called inside": (
        "The loss calls requires_grad_ or backward, or assigns to .data, which torch.func cannot follow. "
        "Take no gradient inside the loss: return its value, and freeze parameters before from_module."
    ),
    r"would mutate a captured Tensor|modified by an inplace operation": (
        "The loss writes in place into a tensor that it was not given to write into, such as a leaf of meta, "
        "a frozen parameter, or a buffer of a loss that is not made by from_module. Compute a new tensor, "
        "make it a buffer of the module, or return a new one with the buffers."
    ),
    r"vmap: inplace arithmetic": (
        "The loss writes in place into a tensor that does not depend on what vmap maps over, with one that "
        "does. Compute a new tensor instead."
    ),
}
