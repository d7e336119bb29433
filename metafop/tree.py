"""Arithmetic on trees of tensors, leaves by name, and in which transform of torch.func code runs.

torch has neither of these in public: its private functions for them are used here alone.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    CGradInterpreterPtr,
    TransformType,
    _add_batch_dim,
    _wrap_for_grad,
    get_dynamic_layer_stack_depth,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_get_bdim,
    maybe_get_level,
    peek_interpreter_stack,
)
from torch._subclasses import FakeTensor
from torch.func import vjp
from torch.utils import _pytree as pytree

from metafop.types import Tree

map = pytree.tree_map
leaves = pytree.tree_leaves
flatten = pytree.tree_flatten
unflatten = pytree.tree_unflatten
Structure = pytree.TreeSpec


def zeros_like(x: Tree) -> Tree:
    """Return zeros in the form of `x`."""
    return map(torch.zeros_like, x)


def copy(x: Tree) -> Tree:
    """Return a copy of every tensor in `x`; what is one tensor in two places stays one."""
    made = {id(leaf): leaf.clone() for leaf in leaves(x)}
    return map(lambda leaf: made[id(leaf)], x)


def add(x: Tree, y: Tree) -> Tree:
    """Return `x + y`, leaf by leaf."""
    return map(torch.add, x, y)


def scale(x: Tree, factor: float | Tensor) -> Tree:
    """Return `factor * x`, leaf by leaf."""
    return map(lambda a: factor * a, x)


def where(condition: Tensor, x: Tree, y: Tree) -> Tree:
    """Return `x` where the `condition` holds and `y` where it does not, leaf by leaf."""
    if is_surely(condition):  # all that is left out then is work
        return x
    return map(lambda a, b: a if a is b else torch.where(condition, a, b), x, y)


def zero_unless(condition: Tensor, x: Tree) -> Tree:
    """Return `x` where the `condition` holds and zeros where it does not."""
    return x if is_surely(condition) else map(lambda a: torch.where(condition, a, 0.0), x)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Return `⟨x, y⟩` of two tensors of one shape."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.flatten().to(dtype) @ y.flatten().to(dtype)


def norm(x: Tree) -> Tensor:
    """Return the Euclidean norm of all leaves of `x` together."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(leaf) for leaf in leaves(x)]))


def all_finite(x: Tree) -> Tensor:
    """Return whether every number in `x` is finite, as a boolean scalar.

    A sum is finite only if its terms are, and on large tensors takes far less time than looking at each; a
    sum of finite terms that overflows counts as not finite, in no less than float32.
    """
    floats = [leaf for leaf in leaves(x) if is_inexact(leaf)]
    if not floats:
        return torch.tensor(True)
    wide = torch.float32
    for leaf in floats:
        wide = torch.promote_types(wide, leaf.dtype)
    return torch.stack([leaf.sum(dtype=wide) for leaf in floats]).isfinite().all()


def pull(function: Callable[[Tree], Tree], x: Tree, cotangent: Tree) -> Tree:
    """Return the derivative of `⟨cotangent, function(x)⟩` in `x`, by autograd."""
    pullback = vjp(function, x)[1]
    return pullback(cotangent)[0]


def stack(trees: Sequence[Tree]) -> Tree:
    """Return one tree whose leaves are those of `trees`, stacked: what `vmap` maps over."""
    return map(lambda *xs: torch.stack(xs), *trees)


def named(x: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Return the leaves of `x` by dotted name, in the order of `leaves`: "hyper.lr", "precond.conv1.weight".

    prefix: what each name starts with, before a dot (none).
    """
    if isinstance(x, Tensor):
        return {prefix: x}
    found: dict[str, Tensor] = {}
    for key, child in _children(x):
        found.update(named(child, f"{prefix}.{key}" if prefix else key))
    return found


def map_named(function: Callable[[str, Any], Any], x: Tree, prefix: str = "") -> Tree:
    """Return `function(name, leaf)` of every leaf of `x`, named as by `named`; it may be no tensor yet.

    prefix: what each name starts with, before a dot (none).
    """
    if not isinstance(x, dict | tuple | list):
        return function(prefix, x)
    inside = [
        map_named(function, child, f"{prefix}.{key}" if prefix else f"{key}") for key, child in _children(x)
    ]
    if isinstance(x, dict):
        return x | dict(zip(x, inside, strict=True))  # of its own kind, such as an OrderedDict
    return type(x)(*inside) if hasattr(x, "_fields") else type(x)(inside)


def replace(x: Tree, new: dict[str, Tensor]) -> Tree:
    """Return `x` with the leaves that `new` names replaced."""
    old = named(x)
    if not new.keys() <= old.keys():
        raise ValueError(
            f"There are no leaves {sorted(new.keys() - old.keys())}. Name one of {sorted(old)} in full."
        )
    return map_named(lambda name, leaf: new.get(name, leaf), x)


def partition(x: Tree) -> tuple[list[Tensor], Callable[[list[Tensor]], Tree]]:
    """Return the floating-point leaves of `x`, and a function that puts others into their places."""
    everything, structure = pytree.tree_flatten(x)
    differentiable = [leaf.is_floating_point() for leaf in everything]

    def rebuild(floats: list[Tensor]) -> Tree:
        new = iter(floats)
        merged = [next(new) if d else leaf for d, leaf in zip(differentiable, everything, strict=True)]
        return pytree.tree_unflatten(merged, structure)

    return [leaf for d, leaf in zip(differentiable, everything, strict=True) if d], rebuild


def derivative(x: Tree, floats: Iterable[Tensor]) -> Tree:
    """Return a derivative in `x`, given `floats`, that in its floating-point leaves: zero in integers."""
    _, rebuild = partition(map(torch.zeros_like, x))
    return rebuild(list(floats))


def with_params(carry: Tree, params: Iterable[Tensor]) -> Tree:
    """Return the `carry` with other parameters, given as `params` in the order of `carry.params`."""
    everything, structure = pytree.tree_flatten(carry)
    places = param_places(len(everything), lambda leaves: pytree.tree_unflatten(leaves, structure))
    for place, param in zip(places, params, strict=True):
        everything[place] = param
    return pytree.tree_unflatten(everything, structure)


def param_places(count: int, rebuild: Callable[[list], Tree]) -> list[int]:
    """Return which of the `count` leaves that `rebuild` makes a carry of are its parameters.

    By place, not by identity: two parameters, or one and a leaf of the optimizer, may start as one tensor.
    """
    return list(rebuild(list(range(count))).params.values())


def instances(x: Tree, kind: type) -> list[Any]:
    """Return the objects of a `kind` that stand in `x`, but for those within one another."""
    return [each for each in leaves(x, is_leaf=lambda x: isinstance(x, kind)) if isinstance(each, kind)]


def size(x: Tree) -> int:
    """Return the bytes that the leaves of `x` take; a tensor in two places counts once."""
    return sum(leaf.nbytes for leaf in {id(leaf): leaf for leaf in leaves(x)}.values())


def is_tracked(x: Tensor) -> bool:
    """Return whether, inside `grad` or `vjp`, `x` depends on what is differentiated in."""
    return is_gradtrackingtensor(x) and x.requires_grad


def is_concrete(x: Tensor) -> bool:
    """Return whether `x` holds one value: under `vmap` it holds many, and a meta or fake tensor none."""
    inner = unwrapped(x)
    return not (is_batchedtensor(x) or inner.is_meta or isinstance(inner, FakeTensor))


def is_known(x: Tensor) -> bool:
    """Return whether Python may look at `x` here: inside transforms and compiled code it may not."""
    return not torch.compiler.is_compiling() and not is_transforming() and is_concrete(x)


def is_transforming() -> bool:
    """Return whether this code runs inside `vmap`, `grad` or another transform of torch.func."""
    return peek_interpreter_stack() is not None


def is_differentiating() -> bool:
    """Return whether this code runs inside a transform that takes a derivative: any but `vmap`."""
    return any(level.key() != TransformType.Vmap for level in get_interpreter_stack() or ())


def transforms() -> int:
    """Return how many transforms of torch.func this code runs inside: the level of the innermost."""
    return get_dynamic_layer_stack_depth()


def is_without_grad_from(level: int) -> bool:
    """Return whether a derivative is being taken inside a `level`, and no_grad holds around that one.

    torch then records nothing for the levels below it, though gradients are enabled.
    """
    stack = get_interpreter_stack() or ()
    inner = (each for each in stack[level:] if each.key() == TransformType.Grad)
    return any(not CGradInterpreterPtr(each).prevGradMode() for each in inner)


def is_surely(condition: Tensor) -> bool:
    """Return whether a `condition` is known to hold."""
    return is_known(condition) and bool(condition)


def batch_levels() -> int:
    """Return how many transforms `vmap` this code runs inside."""
    return sum(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ())


def is_batched(x: Tensor) -> bool:
    """Return whether `x` depends on what `vmap` maps over."""
    return is_batchedtensor(x)


def is_inexact(x: Tensor) -> bool:
    """Return whether the numbers of `x` are real or complex, not integers: such as have derivatives."""
    return x.is_floating_point() or x.is_complex()


def unwrapped(x: Tensor) -> Tensor:
    """Return the numbers of `x` beneath all transforms: under `vmap` those of the whole batch."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def is_wrapped(x: Tensor) -> bool:
    """Return whether `x` takes part in a transform of torch.func."""
    return is_functorch_wrapped_tensor(x)


def is_tracked_from(x: object, level: int) -> bool:
    """Return whether a derivative that is taken at a `level` or inside it depends on `x`.

    Level 0 is that of torch.autograd, beneath all transforms.
    """
    if not isinstance(x, Tensor):
        return False
    if not is_functorch_wrapped_tensor(x):
        return level == 0 and x.requires_grad
    return maybe_get_level(x) >= level and (is_tracked(x) or is_tracked_from(get_unwrapped(x), level))


def without_levels(x: Tree, level: int) -> Tree:
    """Return the tensor `x` as a constant for derivatives that are taken at a `level` or inside it.

    Derivatives around it, and `vmap` at any level, still see what it is. Other objects stay as they are.
    """
    if not isinstance(x, Tensor) or not is_functorch_wrapped_tensor(x) or maybe_get_level(x) < level:
        return x
    inner, own = without_levels(get_unwrapped(x), level), maybe_get_level(x)
    return (
        _add_batch_dim(inner, maybe_get_bdim(x), own) if is_batchedtensor(x) else _wrap_for_grad(inner, own)
    )


def is_recorded(x: Tensor) -> bool:
    """Return whether torch.autograd, beneath all transforms, has recorded how `x` came about."""
    return unwrapped(x).requires_grad


def _children(x: Tree) -> Iterable[tuple[str, Tree]]:
    if isinstance(x, dict):
        return x.items()
    fields = getattr(x, "_fields", None) or [str(i) for i in range(len(x))]
    return zip(fields, x, strict=True)
