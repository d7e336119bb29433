"""An optimizer of one's own completed: what it does not define has a default by autograd."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from metafop import tree
from metafop.hidden_derivatives import TO_NUMBERS
from metafop.optimizers import hyper as hyperparameters
from metafop.protocols import CompleteOptimizer, Domains
from metafop.types import Params, Tree

_CREDIT = ("init_memory", "credit", "toward")


def completed(owner: str, optimizer: Any) -> CompleteOptimizer:
    """Return the `optimizer` with all that learning needs of it, or refuse what is none.

    owner: who asks, in the sentence of a refusal.
    """
    if isinstance(optimizer, torch.optim.Optimizer) or _is_torch_class(optimizer):
        _refuse_torch(owner, optimizer)
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise TypeError(f"{owner} takes an optimizer, got the class {name}. Pass {name}().")
    missing = [name for name in ("domains", "init", "update") if not hasattr(optimizer, name)]
    if missing:
        raise TypeError(
            f"{owner} takes an optimizer, which has domains, init and update, got {optimizer!r} without "
            f"{', '.join(missing)}. Pass one such as Adam(), or define what is missing."
        )
    _check_domains(owner, optimizer)
    if isinstance(optimizer, CompleteOptimizer):
        return optimizer
    without = [name for name in _CREDIT if not hasattr(optimizer, name)]
    if 0 < len(without) < len(_CREDIT):
        raise TypeError(
            f"{owner} got {optimizer!r}, which has some of {', '.join(_CREDIT)}, but not "
            f"{', '.join(without)}. Define all three, or none: then a step is credited to its gradient alone."
        )
    return ByAutograd(optimizer)


def _check_domains(owner: str, optimizer: Any) -> None:
    for name, domain in optimizer.domains.items():
        for each in domain if isinstance(domain, tuple) else (domain,):
            if isinstance(each, type) or not hasattr(each, "holds"):
                raise TypeError(
                    f"{owner} got {optimizer!r} with {each!r} as the domain of {name}. Pass Positive(), "
                    "Unit(), Free() or a tuple of these, of metafop.optimizers."
                )


@dataclass(frozen=True, repr=False)
class ByAutograd:
    """An optimizer that defines `domains`, `init` and `update`, and perhaps more, completed by defaults.

    hyper       a NamedTuple of the values given, one for each of its domains
    pullback    the derivative of `update`, by autograd
    credit      all to the last gradient

    rule: the optimizer.

    >>> class Sign:
    ...     domains = {"lr": metafop.optimizers.Positive()}
    ...     def init(self, params):
    ...         return ()
    ...     def update(self, hyper, params, opt, direction):
    ...         return {k: p - hyper.lr * direction[k].sign() for k, p in params.items()}, ()
    >>> training = Training(metafop.functional.plain(lambda params, batch: params["w"].sum()), Sign())
    >>> params = {"w": torch.zeros(2)}
    >>> carry, _ = training.step(training.init_meta(params, lr=0.5), training.init(params), None)
    >>> carry.params["w"]
    tensor([-0.5000, -0.5000])
    """

    rule: Any

    def __repr__(self) -> str:
        plain = type(self.rule).__repr__ is object.__repr__  # an address, which tells nothing
        return f"{type(self.rule).__name__}()" if plain else repr(self.rule)

    @property
    def domains(self) -> Domains:
        return self.rule.domains

    def hyper(self, **values: Any) -> Any:
        """Return the hyperparameters as tensors, given as `values` by name."""
        if hasattr(self.rule, "hyper"):
            return hyperparameters.made(self.rule, values)
        missing = [name for name in self.domains if name not in values]
        if missing:
            raise TypeError(
                f"{self} needs a value for {', '.join(missing)}, got {', '.join(values) or 'none'}. "
                f"Pass {', '.join(f'{name}=...' for name in missing)}."
            )
        ordered = {name: values[name] for name in self.domains}
        return hyperparameters.named_tuple(ordered, hyperparameters.tensors(self, self.domains, ordered))

    def init(self, params: Params) -> Tree:
        return self.rule.init(params)

    def update(self, hyper: Any, params: Params, opt: Tree, direction: Params) -> tuple[Params, Tree]:
        versions = None if torch.compiler.is_compiling() else [p._version for p in params.values()]
        with _numbers_refused(self, (hyper, params, opt, direction)):
            returned = self._updated(hyper, params, opt, direction)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"The update of {self} returns (params, opt), got {type(returned).__name__}. Return both; "
                "() where there is no state."
            )
        if versions is not None and versions != [p._version for p in params.values()]:
            raise ValueError(_WRITES.format(self))
        return returned

    def _updated(self, hyper: Any, params: Params, opt: Tree, direction: Params) -> Any:
        try:
            return self.rule.update(hyper, params, opt, direction)
        except TypeError as error:
            if "dict" in str(error) and any(isinstance(value, dict) for value in hyper):
                raise TypeError(
                    f"The update of {self} takes a dict by pattern for a number ({error}). Read a "
                    "hyperparameter by metafop.optimizers.at(hyper.lr, name)."
                ) from error
            raise
        except RuntimeError as error:
            if re.search("mutate a captured Tensor|in-place operation", str(error)):
                raise ValueError(_WRITES.format(self)) from error
            raise

    def pullback(
        self, hyper: Any, params: Params, opt: Tree, direction: Params, cotangent: Params
    ) -> tuple[Any, Params]:
        if hasattr(self.rule, "pullback"):
            return self.rule.pullback(hyper, params, opt, direction, cotangent)
        return tree.pull(lambda x: self.update(x[0], params, opt, x[1])[0], (hyper, direction), cotangent)

    def init_memory(self, params: Params) -> Tree:
        return self.rule.init_memory(params) if self._credits else ()

    def credit(self, hyper: Any, memory: Tree, grads: Params) -> tuple[Params | tuple[()], Tree]:
        return self.rule.credit(hyper, memory, grads) if self._credits else ((), ())

    def toward(self, hyper: Any, params: Params, opt: Tree, direction: Params, cotangent: Params) -> Params:
        if self._credits:
            return self.rule.toward(hyper, params, opt, direction, cotangent)
        return self.pullback(hyper, params, opt, direction, cotangent)[1]

    @property
    def _credits(self) -> bool:
        return hasattr(self.rule, "credit")


_WRITES = "The update of {} writes into tensors that it is given. Return new ones instead."


class _NumbersRefused(TorchFunctionMode):
    """Refuses to take a number out of a tensor that a derivative goes through, and would then miss."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.rule = rule

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in TO_NUMBERS
            and func is not torch.as_tensor
            and any(tree.is_tracked_from(x, 0) for x in args)
        ):
            raise NotImplementedError(
                f"The update of {self.rule} takes a number out of a tensor ({func.__name__}), so that the "
                "derivative of a training would miss what depends on it. Compute with tensors."
            )
        return func(*args, **(kwargs or {}))


def _numbers_refused(rule: Any, given: Any) -> AbstractContextManager[Any]:
    if torch.compiler.is_compiling() or not any(tree.is_tracked_from(x, 0) for x in tree.leaves(given)):
        return nullcontext()
    return _NumbersRefused(rule)


def _is_torch_class(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, torch.optim.Optimizer)


_TWINS = {"SGD": "SGD() or metafop.Momentum()", "Adam": "Adam()", "AdamW": "Adam()"}


def _refuse_torch(owner: str, optimizer: Any) -> None:
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    twin = _TWINS.get(kind.__name__)
    remedy = f"Pass metafop.{twin}." if twin else "Write its rule as a class with domains, init and update."
    raise TypeError(
        f"{owner} takes an optimizer that is a pure function, got {kind.__module__}.{kind.__name__}, which "
        f"changes parameters in place. {remedy}"
    )
