"""What estimators over many steps refuse, and in which words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from metafop import torch_errors, tree, validation
from metafop.hypergradients.graphs import detached
from metafop.protocols import Batches, Trains
from metafop.types import Batch, Meta

Check = Literal["repeat", "hessian", "buffers", "compiled"]
Skip = tuple[Check, ...]  # the checks that an estimator leaves out


def check_skip(owner: str, skip: Skip) -> None:
    """Refuse to skip checks that do not exist."""
    if not isinstance(skip, tuple) or not set(skip) <= set(get_args(Check)):
        raise ValueError(
            f"{owner} skips a tuple of checks out of {get_args(Check)}, got skip={skip!r}. Pass such a tuple."
        )


def check_progress(owner: str, progress: Any) -> None:
    """Refuse what cannot be told how far it is."""
    if progress is not None and (isinstance(progress, type) or not callable(progress)):
        raise TypeError(
            f"{owner} takes as progress a function (what, done, total), got {progress!r}. "
            "Pass one such as metafop.progress.Line()."
        )


def check_estimator(owner: str, estimator: Any) -> None:
    """Refuse a name, or a class, where an estimator is meant."""
    if isinstance(estimator, str):
        raise TypeError(
            f"{owner} takes an estimator itself, got its name {estimator!r}. "
            "Pass one of metafop.hypergradients, such as metafop.hypergradients.adjoint."
        )
    validation.instance(owner, "an estimator", estimator)
    if not callable(estimator):
        raise TypeError(
            f"{owner} takes an estimator, got {estimator!r}. Pass one such as metafop.hypergradients.adjoint."
        )


@runtime_checkable
class Selective(Protocol):
    """An estimator that finds the derivative in some leaves only."""

    def check_learnable(self, names: tuple[str, ...]) -> None:
        """Refuse to learn leaves of these names if one is among them in which there is no derivative."""
        ...


def check_learnable(estimator: Any, names: tuple[str, ...]) -> None:
    """Refuse to learn what an estimator gives no derivative in."""
    if isinstance(estimator, Selective):
        estimator.check_learnable(names)


def accepted(meta: Meta, carry: Any) -> tuple[Meta, Any]:
    """Return meta and the carry, or refuse a carry of which torch.autograd keeps a record.

    An estimate is no part of its graph. Where a transform of torch.func takes a derivative, that goes
    through.
    """
    if not tree.is_differentiating():
        for name, leaf in _named(carry).items():
            if tree.is_recorded(leaf):
                raise ValueError(
                    f"The carry's {name} requires grad, and an estimate is no part of torch.autograd's "
                    "graph. Pass its detach(): the derivative in the carry is in estimate.start."
                )
    return detached((meta, carry))


def _named(carry: Any) -> dict[str, Tensor]:
    params = getattr(carry, "params", None)
    known = tree.named(params, "params") if isinstance(params, dict) else {}
    others = [x for x in tree.leaves(carry) if isinstance(x, Tensor)]
    return known | {f"leaf {i}": x for i, x in enumerate(others)}


def horizon(training: Trains, meta: Meta, carry: Any, batches: Batches) -> int:
    """Return T, the number of steps, or refuse what cannot be unrolled."""
    if not hasattr(batches, "__len__") or not hasattr(batches, "__getitem__"):
        raise TypeError(
            f"The batches are a {type(batches).__name__}, which cannot be asked twice for the same one. "
            "Pass a sequence, such as list(batches)."
        )
    if len(batches) == 0:
        raise ValueError("There are no batches, so no step to differentiate. Pass at least one.")
    validation.carry(carry)
    training.check(meta, carry)
    return len(batches)


def batch_at(batches: Batches, t: int) -> Batch:
    """Return the batch of step t, or refuse batches that are fewer than their length says."""
    try:
        return batches[t]
    except IndexError as error:
        raise ValueError(
            f"The batches run out at step {t}, but their len() promises {len(batches)}. "
            "Pass a sequence whose [t] gives a batch for every t below its len()."
        ) from error


@contextmanager
def explained_errors() -> Iterator[None]:
    """A context in which torch's errors about what it cannot differentiate become sentences with a remedy.

    Gradients are enabled in it, whatever the caller does: without, torch's fused LSTM leaves out what its
    derivative needs.
    """
    with torch.enable_grad():
        try:
            yield
        except RuntimeError as error:
            torch_errors.explain(error)
            raise
