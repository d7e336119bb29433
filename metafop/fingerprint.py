"""A run in a few numbers, to tell it from another: where it starts, its batches, what its losses return."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Generator, Tensor

from metafop import tree
from metafop.hypergradients import EvolutionCarry, ForwardCarry
from metafop.hypergradients.outer_loss import value_of
from metafop.hypergradients.validation import batch_at, horizon
from metafop.protocols import Batches, Trains
from metafop.types import Meta, OuterLoss

Numbers = dict[str, tuple[float, float]]  # each with how far rounding may move it

_MOVE = 0.1  # of each parameter: far enough that losses which agree at the start do not agree there


def fingerprint(
    training: Trains, meta: Meta, start: Any, batches: Batches, outer_loss: OuterLoss
) -> list[dict[str, Numbers]]:
    """Return the numbers of what training is given, and of what it sees: the second follow from the first.

    Training sees the loss of the first and of the last batch, and the norms of its gradients. These and the
    outer loss are taken at the start with its parameters moved by fixed pseudo-random numbers or, where they
    are not finite there, at the start itself.
    """
    carry, rng = _one_carry(start)
    steps = horizon(training, meta, carry, batches)
    ends = [batch_at(batches, 0), batch_at(batches, steps - 1)]
    window = (_projected(batch_at(batches, t)) for t in range(steps))
    given = {"start": _projected([carry, rng]), "batches": _summed(window) | {"steps": (float(steps), 0.0)}}

    def loss(carry: Any) -> Numbers:
        seen = [training.evaluate(meta, carry, batch) for batch in ends]
        norms = [torch.linalg.vector_norm(g).item() for s in seen for g in s.grads.values()]
        return _numbers("value", [s.value.item() for s in seen], precision) | _numbers(
            "norm", norms, precision
        )

    def outer(carry: Any) -> Numbers:
        return _numbers("value", [value_of(outer_loss, meta, carry).item()], precision)

    precision = max(_precision(p) for p in carry.params.values())
    return [given, {"loss": _finite("loss", loss, carry), "outer loss": _finite("outer loss", outer, carry)}]


def same(x: Numbers, y: Any) -> bool:
    """Return whether y, which may come from anywhere, has the numbers x but for rounding."""

    def near(number: float, margin: float, other: Any) -> bool:
        match other:
            case (float(value), float()):
                return number == value or abs(number - value) <= margin
        return False

    return isinstance(y, dict) and x.keys() == y.keys() and all(near(*x[k], y[k]) for k in x)


def _one_carry(start: Any) -> tuple[Any, Any]:
    """Return the carry that a loss takes (of particles, the first), and the state of their generator."""
    if isinstance(start, EvolutionCarry):
        return tree.map(lambda x: x[0], start.carries), start.rng
    return (start.carry if isinstance(start, ForwardCarry) else start), ()


def _finite(name: str, told: Callable[[Any], Numbers], carry: Any) -> Numbers:
    for size in (_MOVE, 0.0):
        numbers = told(_moved(carry, size))
        if all(math.isfinite(x) for x, _ in numbers.values()):
            return numbers
    raise ValueError(
        f"meta_train takes a folder if it can tell this run from another, but the {name} or its gradient is "
        "not finite at the start of episode 0. Start elsewhere, or pass folder=None."
    )


def _moved(carry: Any, size: float) -> Any:
    """Return the carry with every parameter p moved by up to size |p|; zeros by as much as others, or 1."""
    rng = Generator().manual_seed(0)

    def moved(p: Tensor) -> Tensor:
        mean = p.abs().mean()
        scale = torch.where(p == 0, torch.where(mean == 0, 1.0, mean), p.abs())
        return p + size * scale * _noise(p, rng).to(p)

    return tree.with_params(carry, map(moved, carry.params.values()))


def _projected(x: Any) -> Numbers:
    """Return ⟨x, r⟩ of every tensor, r being fixed pseudo-random numbers, named by its dtype and shape."""
    rng, numbers = Generator().manual_seed(0), {}
    for i, leaf in enumerate(tree.leaves(x)):
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            continue  # of such a batch, what the loss makes of it must tell
        real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        finite = real.detach().cpu().double().nan_to_num(0.0, 1.0, -1.0)
        margin = _precision(real) * torch.linalg.vector_norm(finite).item()
        name = f"{i}: {leaf.dtype} {tuple(leaf.shape)}"
        numbers[name] = (torch.sum(finite * _noise(real, rng)).item(), margin)
    return numbers


def _summed(window: Iterable[Numbers]) -> Numbers:
    """Return the numbers of all batches added up, each times its place, so that their order counts too."""
    total: Numbers = {}
    for place, batch in enumerate(window, 1):
        for name, (value, margin) in batch.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + place * value, before[1] + place * margin)
    return total


def _noise(like: Tensor, rng: Generator) -> Tensor:
    # Uniform, not normal: these bits are the same on every machine.
    return 2 * torch.rand(like.shape, dtype=torch.float64, generator=rng) - 1


def _numbers(name: str, values: list[float], precision: float) -> Numbers:
    """Rounding counts relative to the largest: the gradient of a bias before batch norm is nothing else."""
    margin = precision * max(abs(x) for x in values)
    return {f"{name} {i}": (x, margin) for i, x in enumerate(values)}


def _precision(x: Tensor) -> float:
    """Return √eps: what rounding does to a long computation stays below, what another loss does is above."""
    return torch.finfo(x.dtype if x.is_floating_point() else torch.float64).eps ** 0.5
