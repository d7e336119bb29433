"""Pure losses: from a plain function of the parameters, or from an `nn.Module`, its buffers explicit."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import inspect
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from metafop import randomness, tree
from metafop.module_copies import Copies, copied
from metafop.types import Batch, Buffers, Loss, Params, Tree

_DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def plain(loss: Callable[..., Tensor], seeded: bool = False) -> Loss:
    """Return `loss(params, batch)` as a loss that takes buffers and hands them on as they are.

    loss: returns a scalar, as a pure function of a dict of tensors, of a batch, which may be anything, and,
        if it has a third argument, of the leaves that `init_meta(loss=…)` was given.
    seeded: whether the loss may draw random numbers by torch's functions (False). They are then those of
        buffers["seed"], which is the run's seed and the number of the step. The same step draws the same
        numbers whenever it is taken.

    >>> square = plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> square({"w": torch.tensor(3.0)}, {}, torch.tensor(1.0))
    (tensor(4.), {})
    >>> noisy = plain(lambda params, batch: (params["w"] + torch.randn(2)).square().sum(), seeded=True)
    >>> value, buffers = noisy({"w": torch.zeros(2)}, {"seed": torch.tensor(0)}, None)
    >>> penalized = plain(lambda params, batch, leaves: leaves["l2"] * params["w"].square().sum())
    >>> penalized({"w": torch.tensor(3.0)}, {}, None, {"l2": torch.tensor(0.5)})
    (tensor(4.5000), {})
    """

    def lifted(params: Params, buffers: Buffers, batch: Batch, *leaves: Tree) -> tuple[Tensor, Buffers]:
        if seeded and "seed" not in buffers:
            raise ValueError(
                f"A seeded loss takes its seed from the buffers, got {sorted(buffers)}. "
                'Start with one: training.init(params, {"seed": torch.tensor(0)}).'
            )
        with _drawing(buffers, seeded):
            value = loss(params, batch, *leaves)
        return value, _after(buffers, seeded)

    return _declared(lifted, takes_leaves(loss, 2))


def takes_leaves(function: Callable[..., Any], others: int) -> bool:
    """Return whether a `function` has one argument after so many `others`, and needs it.

    One that has a default value is a setting of the function's own.
    """
    return not _takes(function, others) and _takes(function, others + 1)


def with_leaves(loss: Loss) -> Loss:
    """Return the `loss` as one that takes the leaves of meta, whether it reads any or not."""
    if takes_leaves(loss, 3):
        return loss
    return lambda params, buffers, batch, leaves: loss(params, buffers, batch)


def _declared(lifted: Callable[..., tuple[Tensor, Buffers]], leaves: bool) -> Loss:
    """Return a loss that takes leaves or does not, as its signature then says."""
    if leaves:
        return lambda params, buffers, batch, leaves: lifted(params, buffers, batch, leaves)
    return lambda params, buffers, batch: lifted(params, buffers, batch)


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*count * [None])
    except TypeError:
        return False
    except ValueError:  # it has no signature to look at
        return False
    return True


def from_module(
    model: nn.Module, loss: Callable[..., Tensor], seeded: bool = False
) -> tuple[Loss, Params, Buffers]:
    """Return a pure loss, and copies of the model's trainable parameters and of its buffers.

    model: is copied and never changed. Parameters that do not require a gradient stay as they are.
    loss: `loss(model, batch)` returns a scalar, and is written as always. It is given a copy of the model
        with the parameters and buffers of the call, and may use all of it: `model(x)`, `model.encode(x)`,
        `model[0].weight`, `model.parameters()`. Choose among parameters by name: they are plain tensors
        there, and require a gradient only while one is taken. What is written into buffers is handed on. A
        third argument is given the leaves that `init_meta(loss=…)` was given.
    seeded: whether the model and the loss may draw random numbers, as dropout does (False). They are those of
        buffers["seed"], as in `plain`; another run has another seed there: torch.tensor(7).

    >>> def penalized(model, batch):
    ...     return model(batch).mean() + 0.1 * sum(p.square().sum() for p in model.parameters())
    >>> loss, params, buffers = from_module(torch.nn.Linear(2, 1), penalized)
    >>> loss({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, buffers, torch.ones(3, 2))
    (tensor(3.3000), {})

    A loss that would change later calls is refused: one that writes into parameters or converts them, or
    leaves a module in another mode, or with other submodules, parameters, buffers or hooks registered. For a
    loss in eval mode, call this once more with `model.eval()`. What is set in other attributes, such as a
    count of calls or the last activations, is not seen, and the next call finds it there. Nor is, outside of
    `Training.evaluate` or under torch.compile, what is written into the parameters of a call, or by `.data`
    into any parameter.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(0.1))
    >>> loss, params, buffers = from_module(model, lambda model, batch: model(batch).mean(), seeded=True)
    >>> sorted(params), buffers
    (['0.bias', '0.weight'], {'seed': tensor(0)})
    >>> value, buffers = loss(params, buffers, torch.ones(3, 2))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"from_module takes an nn.Module first, got {type(model).__name__}. Pass the model.")
    _refuse_impurity(model, seeded)
    model = copied(model)
    params = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}
    buffers = {k: b.detach() for k, b in model.named_buffers()}
    if seeded and "seed" in buffers:
        raise ValueError(
            "from_module keeps the seed in a buffer named 'seed', got a model with one. Rename it."
        )
    names, written = params.keys(), list(buffers)
    buffer_names = {*written, "seed"} if seeded else {*written}
    copies = Copies(model, loss, {*names, *written})

    def pure(params: Params, buffers: Buffers, batch: Batch, *leaves: Tree) -> tuple[Tensor, Buffers]:
        _check_names(params, buffers, names, buffer_names)
        writable = _writable({k: buffers[k] for k in written}, (params, buffers, batch, leaves))
        with _drawing(buffers, seeded):
            value, after = copies(params, writable, batch, *leaves)
        return value, _after(buffers, seeded) | after

    lifted = _declared(pure, takes_leaves(loss, 2))
    device = next((x.device for x in (*params.values(), *buffers.values())), None)
    return lifted, params, buffers | {"seed": torch.tensor(0, device=device)} if seeded else buffers


def _writable(buffers: Buffers, given: Any) -> Buffers:
    """Return copies of the buffers, for a module to write into.

    Under vmap they must have the batch dimensions of everything that may be written: all that is given.
    """
    if not buffers:
        return {}
    inputs = [x for x in tree.leaves(given) if isinstance(x, Tensor) and x.layout == torch.strided]
    place = inputs[0].device
    zero = torch.stack([x.new_zeros((), dtype=torch.float32, device=place) for x in inputs]).sum()
    return {k: b + zero.to(b.dtype) for k, b in buffers.items()}


def _check_names(params: Params, buffers: Buffers, names: Set[str], buffer_names: Set[str]) -> None:
    """Refuse parameters and buffers that are not those of the module."""
    if params.keys() != names:
        raise ValueError(
            f"The parameters are {sorted(params)}, but the module has {sorted(names)}. "
            "The tree of parameters must not change."
        )
    if buffers.keys() - buffer_names == {"seed"}:
        raise ValueError(
            "The buffers have a seed, for which this loss was not made. Make it with seeded=True, too: in "
            "eval mode nothing draws from it."
        )
    if buffers.keys() != buffer_names:
        raise ValueError(
            f"The buffers are {sorted(buffers)}, but the module has {sorted(buffer_names)}. "
            "Start with those that from_module returns: training.init(params, buffers)."
        )


def _drawing(buffers: Buffers, seeded: bool) -> AbstractContextManager[Any]:
    return randomness.seeded(buffers["seed"]) if seeded else nullcontext()


def _after(buffers: Buffers, seeded: bool) -> Buffers:
    return buffers | {"seed": randomness.next_seed(buffers["seed"])} if seeded else buffers


def _refuse_impurity(model: nn.Module, seeded: bool) -> None:
    for name, module in model.named_modules():
        reason = _impurity(module, seeded)
        if reason:
            raise ValueError(f"The module {name or 'itself'} ({module}) {reason}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, x in tensors.items():
        if x._backward_hooks:
            raise ValueError(
                f"The parameter {name!r} has a hook, which a pure loss does not call. "
                "Remove it, and change the gradient in an optimizer or a preconditioner."
            )
    for (name, x), (other, y) in combinations(tensors.items(), 2):
        if _overlap(x, y):
            raise ValueError(
                f"{name!r} and {other!r} share memory, which a pure loss could not keep up. "
                "Make one nn.Parameter of them, used twice, or clone one."
            )


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors lie in the same memory, not only in the same storage."""
    if not all(each.layout == torch.strided and each.numel() and tree.is_concrete(each) for each in (x, y)):
        return False
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    (first, last), (start, end) = map(_extent, (x, y))
    return first < end and start < last


def _extent(x: Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def _impurity(module: nn.Module, seeded: bool) -> str:
    """Return why the module is no pure function, and what to do; or nothing."""
    if isinstance(module, torch.jit.ScriptModule | nn.DataParallel):
        return "cannot compute with the parameters of a call. Pass the module that it was made of."
    draws = isinstance(module, _DRAWS) and getattr(module, "p", 1.0) > 0
    inside = isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
    if module.training and (draws or inside) and not seeded:
        return (
            "draws random numbers in training mode, so that the loss is no function of its arguments. "
            "Pass seeded=True, put it in eval mode, or pass the noise with the batch."
        )
    if module.training and isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None:
        return (
            "averages over all batches by a count that it reads as a number of Python, "
            "which neither vmap nor a compiled step can. Give it a momentum, such as 0.1."
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            return (
                "shortens the rows of its weight in place, so that the loss would change its arguments. "
                "Pass max_norm=None, and shorten the rows that it returns."
            )
        if module.scale_grad_by_freq:
            return (
                "divides gradients by counts, which torch leaves out of second derivatives. "
                "Pass scale_grad_by_freq=False, and weigh the loss."
            )
        if module.sparse:
            return "has sparse gradients, which nothing here adds up. Pass sparse=False."
    for hook, kind in ((WeightNorm, "weight_norm"), (SpectralNorm, "spectral_norm")):
        if any(isinstance(each, hook) for each in module._forward_pre_hooks.values()):
            return (
                f"computes its weight in a hook, torch.nn.utils.{kind}, that writes to the module. "
                f"Use torch.nn.utils.parametrizations.{kind}."
            )
    if any(is_lazy(x) for x in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        return "has parameters of no shape yet. Call the model once on a batch, then from_module."
    return ""
