"""What a training refuses: one sentence each, with the object, the value and the remedy."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from metafop import tree
from metafop.types import Buffers, Carry, Loss, Meta, Params, Tree


def instance(owner: str, what: str, value: object) -> None:
    """Refuse a class where one of its objects is meant."""
    if isinstance(value, type):
        name = value.__name__
        raise TypeError(f"{owner} takes {what}, got the class {name}. Pass {name}().")


def loss(owner: str, loss: Loss) -> None:
    if isinstance(loss, nn.Module):
        raise TypeError(
            f"{owner} takes a loss, got the module {type(loss).__name__}. "
            "Make a loss of it: functional.from_module(model, loss)."
        )
    try:
        signature = inspect.signature(loss)
    except TypeError:
        signature = None
    except ValueError:  # it has no signature to look at
        return
    if signature is None or not (_binds(signature, 3) or _binds(signature, 4)):
        raise TypeError(
            f"{owner} takes a loss of (params, buffers, batch) and, if any are learned, leaves of meta; got "
            f"{loss!r}, which is none. Lift a loss(params, batch) with functional.plain."
        )


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*count * [None])
    except TypeError:
        return False
    return True


def loss_domains(domains: Any) -> None:
    if not isinstance(domains, Mapping):
        raise TypeError(
            f"Training takes loss_domains by pattern of names, got {domains!r}. "
            'Pass a dict such as {"l2": Positive()}.'
        )
    for pattern, domain in domains.items():
        if isinstance(domain, type) or not hasattr(domain, "holds"):
            raise TypeError(
                f"Training got {domain!r} as the domain of {pattern!r} in loss_domains. Pass Positive(), "
                "Unit() or Free() of metafop.optimizers."
            )


def preconditioners(preconditioners: Mapping[str, Any]) -> None:
    if not isinstance(preconditioners, Mapping):
        raise TypeError(
            f"Training takes preconditioners by parameter name, got {preconditioners!r}. "
            "Pass a dict, such as assign(params) makes."
        )
    for name, family in preconditioners.items():
        instance("Training", f"a preconditioner for {name!r}", family)
        missing = [method for method in ("init", "apply", "pullback") if not hasattr(family, method)]
        if missing:
            raise TypeError(
                f"A preconditioner has init, apply and pullback, got {family!r} for {name!r} without "
                f"{', '.join(missing)}. Define them; by autograd, pullback is "
                "tree.pull(lambda m: self.apply(m, grad), m, cotangent)."
            )


def params(params: Params) -> None:
    if not isinstance(params, dict):
        raise TypeError(
            f"The parameters are a dict of tensors by name, got {type(params).__name__}. "
            "For a module, take those that functional.from_module returns."
        )
    if not params:
        raise ValueError("The parameters are an empty tree. Pass a dict of at least one tensor by name.")
    for name, param in params.items():
        if not isinstance(param, Tensor) or not param.is_floating_point():
            kind = param.dtype if isinstance(param, Tensor) else type(param).__name__
            raise TypeError(
                f"The parameter {name!r} is {kind}, and only real floating-point tensors can be trained. "
                "Convert it, keep it as a buffer, or view a complex one as real (torch.view_as_real)."
            )
        if isinstance(param, nn.Parameter):
            raise TypeError(
                f"The parameter {name!r} is an nn.Parameter, which would record the history of every step. "
                "Pass its detach(), or what functional.from_module returns."
            )
    first, device = next((name, param.device) for name, param in params.items())
    for name, param in params.items():
        if param.device != device:
            raise ValueError(
                f"The parameter {first!r} is on {device} and {name!r} on {param.device}, and training needs "
                f"them on one device. Move the model to one: model.to({str(device)!r})."
            )


def buffers(buffers: Buffers) -> None:
    for name, buffer in buffers.items():
        if not isinstance(buffer, Tensor):
            raise TypeError(
                f"The buffer {name!r} is {buffer!r}, a {type(buffer).__name__}, and buffers are tensors. "
                f"Pass torch.tensor({buffer!r})."
            )


def start(preconditioners: Mapping[str, Any], params: Params, generator: Generator | None) -> None:
    """Refuse preconditioners for parameters that are not there, and what is no generator."""
    for name, family in preconditioners.items():
        if name not in params:
            raise ValueError(
                f"There is no parameter {name!r} for {family}: there are {sorted(params)}. "
                "Correct the name or drop it."
            )
    if generator is not None and not isinstance(generator, Generator):
        raise TypeError(
            f"Training.init_meta takes a torch.Generator as generator, got {generator!r}. "
            "Pass torch.Generator().manual_seed(seed), and hyperparameters by name: lr=0.1."
        )


def distinct(meta: Meta) -> None:
    """Refuse names such as "a" and "a.inputs", if the preconditioner of the first has a tensor `inputs`."""
    if len(tree.named(meta)) < len(tree.leaves(meta)):
        raise ValueError(
            f"The parameters {sorted(meta.precond)} and the tensors of their preconditioners share names. "
            "Rename a parameter."
        )


def returned(result: Any, given: Buffers) -> None:
    """Refuse what a loss must not return."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"A loss returns (value, buffers), got {type(result).__name__}. "
            "Lift a loss(params, batch) with functional.plain."
        )
    value, buffers = result
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"A loss returns a floating-point tensor as value, got {kind}. Return one.")
    if value.dim() != 0:
        raise ValueError(f"A loss returns a scalar value, got shape {tuple(value.shape)}. Take its mean().")
    if not isinstance(buffers, dict):
        raise TypeError(
            f"A loss returns buffers in a dict, got {type(buffers).__name__}. Return {{}} for none."
        )
    if buffers.keys() != given.keys():
        raise ValueError(
            f"A loss returns the buffers that it was given, {sorted(given)}, got {sorted(buffers)}. "
            "Return each under its name, changed or not."
        )


def same_tree(meta: Meta, carry: Carry) -> None:
    _meta(meta)
    if meta.precond.keys() != carry.params.keys():
        raise ValueError(
            f"The parameters are {sorted(carry.params)}, but meta was made for {sorted(meta.precond)}. "
            "The tree of parameters must not change: make a new meta with training.init_meta(params, ...)."
        )
    tensors("hyper", meta.hyper)
    tensors("loss", meta.loss)


def same_device(meta: Meta, params: Params) -> None:
    """Refuse a meta on another device than the parameters."""
    device = next(iter(params.values())).device
    for name, leaf in tree.named(meta).items():
        if leaf.device != device:
            raise ValueError(
                f"{name} of meta is on {leaf.device}, and the parameters are on {device}. Move meta: "
                f"metafop.tree.map(lambda x: x.to({str(device)!r}), meta)."
            )


def tensors(name: str, x: Any) -> None:
    """Refuse a leaf that is no tensor, or one of integers: nothing could be derived in it."""
    if isinstance(x, Tensor) and x.is_floating_point():
        return
    if isinstance(x, Tensor):
        raise TypeError(
            f"{name} is {x.dtype}, and every leaf of meta is a floating-point tensor. Pass its float()."
        )
    if isinstance(x, dict):
        inside = x.items()
    elif isinstance(x, tuple | list):
        inside = zip(getattr(x, "_fields", range(len(x))), x, strict=True)
    else:
        raise TypeError(
            f"{name} is {x!r}, a {type(x).__name__}, and every leaf of meta is a tensor. "
            f"Pass torch.tensor({x!r})."
        )
    for key, each in inside:
        tensors(f"{name}.{key}", each)


def evaluated(meta: Any, carry: Any) -> None:
    """Refuse arguments of `evaluate` that are no meta or no carry."""
    _meta(meta)
    _carry(carry)
    tensors("loss", meta.loss)


def _meta(meta: Any) -> None:
    if not isinstance(meta, Meta):
        raise TypeError(
            f"A training takes a Meta before the carry, got {type(meta).__name__}. "
            "Make one with training.init_meta(params, lr=...)."
        )


def carry(carry: Any) -> None:
    """Refuse what is no carry, such as a meta in its place."""
    if not isinstance(getattr(carry, "params", None), dict):
        raise TypeError(
            f"The carry is a {type(carry).__name__}, which holds no params. Pass what training.init(params) "
            "returns, or the carry of an earlier step or estimate."
        )


_carry = carry


def batch(owner: str, batch: Any) -> None:
    """Refuse a batch that is to be kept and holds something other than tensors."""
    for leaf in tree.leaves(batch):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{owner} learns leaves of the loss and keeps the batch of the last step, which holds "
                f"{leaf!r}, a {type(leaf).__name__}. Pass tensors alone, such as torch.tensor({leaf!r})."
            )


def dense(grads: Params) -> None:
    """Refuse sparse gradients."""
    for name, grad in grads.items():
        if grad.layout != torch.strided:
            raise ValueError(
                f"The loss has a sparse gradient for {name!r}, which no optimizer here adds up. "
                "Pass sparse=False to the embedding that makes it."
            )


def depends(value: Tensor) -> None:
    """Refuse a loss that does not depend on the parameters it is given: its gradient would be zero."""
    if torch.compiler.is_compiling():
        return
    if not (tree.is_tracked(value) if tree.is_transforming() else value.requires_grad):
        raise ValueError(
            "The loss does not depend on the parameters that it is given, so that training would not move. "
            "Compute it from these, not from a module or tensors that it closes over: "
            "functional.from_module makes a loss of a module."
        )


def versions(params: Params, leaves: Tree) -> list[int]:
    """Return how often each tensor was written into, for `unwritten`; torch.compile cannot follow that."""
    if torch.compiler.is_compiling():
        return []
    return [x._version for x in (*params.values(), *tree.leaves(leaves))]


def unwritten(params: Params, leaves: Tree, versions: Sequence[int]) -> None:
    """Refuse a loss that has written into what it is given since that had these versions."""
    if not versions or [x._version for x in (*params.values(), *tree.leaves(leaves))] == versions:
        return
    named = [(f"the parameter {k!r}", x) for k, x in params.items()]
    named += [(f"the leaf {k!r}", x) for k, x in tree.named(leaves).items()]
    for (what, x), version in zip(named, versions, strict=True):
        if x._version != version:
            raise ValueError(
                f"The loss writes into {what} that it is given, as an embedding with max_norm does. "
                "Compute new tensors instead."
            )
