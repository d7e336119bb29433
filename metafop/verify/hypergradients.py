"""Is a function the derivative of a whole training, whatever library computes either?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from metafop.verify.comparison import Comparison, Values
from metafop.verify.report import Report


def check_hypergradient(
    hypergradient: Callable[[Values], Mapping[str, Any]],
    run: Callable[[Values], Any],
    at: Mapping[str, Any],
    numbers: int = 12,
    directions: int = 3,
    seed: int = 0,
) -> Report:
    """Check a function that is to return the derivative of a run, whichever library they are written with.

    It is compared with differences of whole runs, four to ten runs for each: in every number of a small leaf;
    of a large one in some, and along directions that move all of it, in which an error anywhere shows.

    hypergradient: `hypergradient(values)` returns the derivative in each of the values, by name: tensors,
        arrays or numbers.
    run: `run(values)` returns a number, the outer loss after a whole training, and the same one whenever it
        is called. The values are tensors in float64, new ones for every call; it computes in float64 too.
    at: the values to check it at, by name: tensors, arrays or numbers.
    numbers: a leaf of more numbers is large, and so many of it are looked at (12).
    directions: how many directions of a large leaf are looked at besides (3).
    seed: of the random choice of both (0).

    >>> inputs = torch.linspace(-4, 4, 24, dtype=torch.float64).sin().view(8, 3)
    >>> targets, held_out = inputs.sum(1).exp(), inputs.sum(1)
    >>> def run(values):
    ...     w = values["start"].requires_grad_()
    ...     for _ in range(20):
    ...         loss = (inputs @ w - targets).square().mean() + values["l2"] * w.square().sum()
    ...         w = w - values["lr"] * torch.autograd.grad(loss, w, create_graph=True)[0]
    ...     return (inputs @ w - held_out).square().mean()
    >>> def hypergradient(values):
    ...     value = run({k: x.requires_grad_() for k, x in values.items()})
    ...     return dict(zip(values, torch.autograd.grad(value, list(values.values()))))
    >>> at = {"start": torch.zeros(3), "l2": 0.1, "lr": 0.05}
    >>> metafop.verify.check_hypergradient(hypergradient, run, at).ok
    True
    """
    what = getattr(hypergradient, "__name__", repr(hypergradient))
    values = _values(at)
    value, again = _number(run, values), _number(run, values)
    if not math.isfinite(value):
        raise ValueError(
            f"The run gives {value} at the values to check {what} at. Pass others, as a smaller lr."
        )
    if value != again:
        raise ValueError(
            f"The run gives {value!r} and then {again!r} for the same values. Seed in it whatever it draws."
        )
    claimed = _derivatives(what, hypergradient, values)
    compared = Comparison(what, lambda values: _number(run, values), values, value, numbers, directions, seed)
    return Report(tuple(compared.row(name, claimed[name]) for name in values))


def _values(at: Mapping[str, Any]) -> Values:
    if not isinstance(at, Mapping) or not at:
        raise TypeError(
            f'A hypergradient is checked at values by name, got {at!r}. Pass such as {{"lr": 0.1}}.'
        )
    values = {name: _float64(f"the value of {name!r}", x) for name, x in at.items()}
    for name, x in values.items():
        if not x.numel() or not x.isfinite().all():
            raise ValueError(f"The value of {name!r} is {x}, which is not finite numbers. Pass some.")
    return values


def _number(run: Callable[[Values], Any], values: Values) -> float:
    value = run({name: x.clone() for name, x in values.items()})
    shape = tuple(getattr(value, "shape", ()))
    if shape:
        raise ValueError(f"A run returns a scalar, got one of shape {shape}. Take its mean().")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError):
        raise TypeError(
            f"A run returns a number, got a {type(value).__name__}. Return the outer loss."
        ) from None


def _derivatives(
    what: str, hypergradient: Callable[[Values], Mapping[str, Any]], values: Values
) -> dict[str, Tensor]:
    found = hypergradient({name: x.clone() for name, x in values.items()})
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{what} returns derivatives by name, got a {type(found).__name__}. Return a dict with "
            f"{sorted(values)}."
        )
    if found.keys() != values.keys():
        raise ValueError(
            f"{what} returns derivatives in {sorted(found)}, but the values are {sorted(values)}. Return one "
            "for each."
        )
    claimed = {name: _float64(f"what {what} returns for {name!r}", x) for name, x in found.items()}
    for name, x in values.items():
        if claimed[name].shape != x.shape:
            raise ValueError(
                f"{what} returns a derivative of shape {tuple(claimed[name].shape)} for {name!r}, of shape "
                f"{tuple(x.shape)}. Return one of that shape."
            )
    return claimed


def _float64(what: str, x: Any) -> Tensor:
    """Return a copy of a tensor, of an array of any library, or of a number."""
    try:
        found = x.detach() if isinstance(x, Tensor) else _tensor(x)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.is_complex():
        raise TypeError(
            f"{what} is a {type(x).__name__}, of which no real tensor can be made. Pass a tensor."
        )
    return found.to("cpu", torch.float64, copy=True)


def _tensor(x: Any) -> Tensor:
    if hasattr(x, "__dlpack__"):
        with suppress(BufferError):  # of numpy, where it may not be written into
            return torch.from_dlpack(x)
    return torch.tensor(x, dtype=torch.float64)
