"""What a training refuses: one sentence each, with the object, the value and the remedy."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn

from metafop import tree
from metafop.types import Buffers, Carry, Loss, Meta, Params


def instance(owner: str, what: str, value: object) -> None:
    """Refuse a class where one of its objects is meant."""
    if isinstance(value, type):
        name = value.__name__
        raise TypeError(f"{owner} takes {what}, got the class {name}. Pass {name}().")


def loss(loss: Loss) -> None:
    if isinstance(loss, nn.Module):
        raise TypeError(
            f"Training takes a loss, got the module {type(loss).__name__}. "
            "Make a loss of it: functional.from_module(model, loss)."
        )
    try:
        inspect.signature(loss).bind(None, None, None)
    except TypeError:
        raise TypeError(
            f"A loss takes (params, buffers, batch), got {loss!r}, which does not. "
            "Lift a loss(params, batch) with functional.plain."
        ) from None
    except ValueError:  # it has no signature to look at
        return


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
    if not isinstance(meta, Meta):
        raise TypeError(
            f"A training takes a Meta, got {type(meta).__name__}. "
            "Make one with training.init_meta(params, lr=...)."
        )
    if meta.precond.keys() != carry.params.keys():
        raise ValueError(
            f"The parameters are {sorted(carry.params)}, but meta was made for {sorted(meta.precond)}. "
            "The tree of parameters must not change: make a new meta with training.init_meta(params, ...)."
        )
    tensors("hyper", meta.hyper)


def tensors(name: str, x: Any) -> None:
    """Refuse a leaf that is no tensor: nothing could be derived in it."""
    if isinstance(x, Tensor):
        return
    if isinstance(x, dict):
        inside = x.items()
    elif isinstance(x, tuple):
        inside = zip(getattr(x, "_fields", range(len(x))), x, strict=True)
    else:
        raise TypeError(
            f"{name} is {x!r}, a {type(x).__name__}, and every leaf of meta is a tensor. "
            f"Pass torch.tensor({x!r})."
        )
    for key, each in inside:
        tensors(f"{name}.{key}", each)


def carry(carry: Any) -> None:
    """Refuse what is no carry, such as a meta in its place."""
    if not isinstance(getattr(carry, "params", None), dict):
        raise TypeError(
            f"The carry is a {type(carry).__name__}, which holds no params. Pass what training.init(params) "
            "returns, or the carry of an earlier step or estimate."
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
    if not torch.compiler.is_compiling() and not tree.is_tracked(value):
        raise ValueError(
            "The loss does not depend on the parameters that it is given, so that training would not move. "
            "Compute it from these, not from a module or tensors that it closes over: "
            "functional.from_module makes a loss of a module."
        )


def versions(params: Params) -> dict[str, int]:
    """Return how often each parameter was written into, for `unwritten`; torch.compile cannot follow that."""
    return {} if torch.compiler.is_compiling() else {k: p._version for k, p in params.items()}


def unwritten(params: Params, versions: Mapping[str, int]) -> None:
    """Refuse a loss that has written into the parameters since they had these versions."""
    for name, version in versions.items():
        if params[name]._version != version:
            raise ValueError(
                f"The loss writes into the parameter {name!r} that it is given, as an embedding with "
                "max_norm does. Compute new tensors instead."
            )


def explain(error: RuntimeError) -> None:
    """Raise a sentence in place of torch's error, if it is a known one."""
    for pattern, sentence in _KNOWN.items():
        if found := re.search(pattern, str(error)):
            raise NotImplementedError(sentence.format(*found.groups())) from error


# What torch says when torch.func cannot do something, and what is to be done about it.
_KNOWN = {
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
    r"random operation while in randomness error mode": (
        "The loss draws random numbers, which vmap refuses: they would be others whenever a step is taken "
        "again. Pass seeded=True to functional.from_module or functional.plain."
    ),
    r"escaped\?": (
        "The loss keeps a tensor from one call to the next in an attribute or a variable, which torch.func "
        "cannot follow. Make it a buffer (register_buffer), or return it with the buffers."
    ),
    r"Tensor\.requires_grad_\(\)|\.data` inside functorch|backward\(\) called inside": (
        "The loss calls requires_grad_ or backward, or assigns to .data, which torch.func cannot follow. "
        "Take no gradient inside the loss: return its value, and freeze parameters before from_module."
    ),
    r"would mutate a captured Tensor": (
        "The loss writes in place into a tensor that it was not given to write into, such as a frozen "
        "parameter, or a buffer of a loss that is not made by from_module. Make it a buffer of the module, "
        "or return a new one with the buffers."
    ),
    r"vmap: inplace arithmetic": (
        "The loss writes in place into a tensor that does not depend on what vmap maps over, with one that "
        "does. Compute a new tensor instead."
    ),
}
