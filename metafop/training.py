"""Training as a pure function: evaluate the loss, then advance the parameters."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.func import grad_and_value

from metafop import tree
from metafop.optimizers import fitted
from metafop.preconditioners import Identity
from metafop.types import (
    Batch,
    Buffers,
    Carry,
    Domain,
    Info,
    Last,
    Loss,
    Meta,
    Optimizer,
    Params,
    Preconditioner,
    Seen,
    Tree,
)


@dataclass(frozen=True)
class Training:
    """A loss, an optimizer, and a preconditioner for each parameter (those not named get `Identity`).

    seen = evaluate(carry, batch)           value, gradients, buffers: expensive, does not see meta
    carry = advance(meta, carry, seen)      θ' = update(hyper, θ, P(m) ∇J): cheap, sees meta

    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training = Training(loss, SGD())
    >>> params = {"w": torch.zeros(2)}
    >>> meta, carry = training.meta(params, SGD().hyper(lr=0.25)), training.init(params)
    >>> carry, info = training.step(meta, carry, torch.ones(2))
    >>> carry.params["w"], info["value"]
    (tensor([0.5000, 0.5000]), tensor(2.))
    """

    loss: Loss
    optimizer: Optimizer
    preconditioners: Mapping[str, Preconditioner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, type):
            name = self.optimizer.__name__
            raise TypeError(f"Training takes an optimizer, got the class {name}. Pass {name}().")
        if not isinstance(self.preconditioners, Mapping):
            raise TypeError(
                f"Training takes preconditioners by parameter name, got {self.preconditioners!r}. "
                "Pass a dict, such as assign(params) makes."
            )
        for name, family in self.preconditioners.items():
            if isinstance(family, type):
                raise TypeError(
                    f"The preconditioner of {name!r} is a class, {family.__name__}. Pass {family.__name__}()."
                )
        if not _takes_three(self.loss):
            raise TypeError(
                f"A loss takes (params, buffers, batch), got {self.loss!r}, which does not. "
                "Lift a loss(params, batch) with functional.plain."
            )

    @property
    def domains(self) -> Mapping[str, Domain]:
        return self.optimizer.domains

    def meta(self, params: Params, hyper: Any, generator: Generator | None = None) -> Meta:
        """Return where learning starts: `hyper`, as precise as the parameters, and each family's tensors."""
        _check_params(params)
        self._check_families(params)
        if generator is not None and not isinstance(generator, Generator):
            raise TypeError(
                f"Training.meta takes a torch.Generator, got {generator!r}. "
                "Pass torch.Generator().manual_seed(seed)."
            )
        meta = Meta(
            fitted(self.optimizer, hyper, params),
            {k: self._family(k).init(p, generator) for k, p in params.items()},
        )
        if len(tree.named(meta)) < len(tree.leaves(meta)):
            raise ValueError(
                f"The parameters {sorted(params)} and the tensors of their preconditioners share names. "
                "Rename a parameter."
            )
        return meta

    def init(self, params: Params, buffers: Buffers | None = None) -> Carry:
        _check_params(params)
        return Carry(params, self.optimizer.init(params), buffers or {})

    def evaluate(self, carry: Carry, batch: Batch) -> Seen:
        def objective(params: Params) -> tuple[Tensor, Buffers]:
            result = self.loss(params, carry.buffers, batch)
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
                raise ValueError(
                    f"A loss returns a scalar value, got shape {tuple(value.shape)}. Take its mean()."
                )
            if not isinstance(buffers, dict):
                raise TypeError(
                    f"A loss returns buffers in a dict, got {type(buffers).__name__}. Return {{}} for none."
                )
            return value, buffers

        grads, (value, buffers) = grad_and_value(objective, has_aux=True)(carry.params)
        return Seen(value, grads, tree.map(torch.detach, buffers))

    def advance(self, meta: Meta, carry: Carry, seen: Seen) -> tuple[Carry, Info]:
        _check_tree(meta, carry)
        direction = self.precondition(meta.precond, seen.grads)
        params, opt = self.optimizer.update(meta.hyper, carry.params, carry.opt, direction)
        return Carry(params, opt, seen.buffers), {"value": seen.value}

    def step(self, meta: Meta, carry: Carry, batch: Batch) -> tuple[Carry, Info]:
        return self.advance(meta, carry, self.evaluate(carry, batch))

    def pullback(self, meta: Meta, last: Last, cotangent: Params) -> Meta:
        """Return the derivative of ⟨cotangent, params after the last step⟩ in meta, the state before it held.

        This is the truncation that makes the online estimate cheap, and biased (docs/math.md, 1). Without
        credit it is the VJP of `advance`; with credit, P(m) stands before all the gradients that moved θ.
        """
        carry, seen = last.carry, last.seen
        direction = self.precondition(meta.precond, seen.grads)
        step = (meta.hyper, carry.params, carry.opt, direction, cotangent)
        d_hyper, toward = self.optimizer.pullback(*step)
        if last.credit:
            toward = self.optimizer.toward(*step)
        moved_by = last.credit or seen.grads
        return Meta(
            d_hyper,
            {k: self._family(k).pullback(m, moved_by[k], toward[k]) for k, m in meta.precond.items()},
        )

    def precondition(self, precond: dict[str, Tree], grads: Params) -> Params:
        """Return P(m) g for each parameter."""
        return {k: self._family(k).apply(precond[k], g) for k, g in grads.items()}

    def init_memory(self, carry: Carry) -> Tree:
        return self.optimizer.init_memory(carry.params)

    def credited(self, meta: Meta, memory: Tree, grads: Params) -> tuple[Params | tuple[()], Tree]:
        """Return the gradients that this step's movement is made of, and the memory of them."""
        return self.optimizer.credit(meta.hyper, memory, grads)

    def check(self, meta: Meta, carry: Carry) -> None:
        """Refuse a meta that was made for other parameters."""
        _check_tree(meta, carry)
        if tree.is_transforming():  # where vmap forbids the random numbers that a family may start from
            return
        for name, param in carry.params.items():
            family = self._family(name)
            expected = tree.map(lambda x: x.shape, family.init(param, Generator(param.device)))
            found = tree.map(lambda x: x.shape, meta.precond[name])
            if expected != found:
                raise ValueError(
                    f"{family} of {name!r}, {tuple(param.shape)}, has tensors of shape {found}, "
                    f"but needs {expected}. Make meta with training.meta(params, ...)."
                )

    def _check_families(self, params: Params) -> None:
        for name, family in self.preconditioners.items():
            if name not in params:
                raise ValueError(
                    f"There is no parameter {name!r} for {family}: there are {sorted(params)}. "
                    "Correct the name or drop it."
                )

    def _family(self, name: str) -> Preconditioner:
        return self.preconditioners.get(name, _IDENTITY)


_IDENTITY = Identity()


def _takes_three(loss: Loss) -> bool:
    try:
        inspect.signature(loss).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # no signature to look at
        return True
    return True


def _check_params(params: Params) -> None:
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


def _check_tree(meta: Meta, carry: Carry) -> None:
    if meta.precond.keys() != carry.params.keys():
        raise ValueError(
            f"The parameters are {sorted(carry.params)}, but meta was made for {sorted(meta.precond)}. "
            "The tree of parameters must not change: make a new meta with training.meta(params, ...)."
        )
