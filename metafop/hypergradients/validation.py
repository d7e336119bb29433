"""What estimators over many steps refuse, and in which words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

from metafop import validation
from metafop.types import Batch, Batches, Meta, Trains

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
            validation.explain(error)
            raise
