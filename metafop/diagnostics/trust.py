"""Whether to trust a hypergradient: how smooth training is in meta, how far estimates of it differ.

All of it is in the coordinates z in which leaves are learned: log lr, logit momentum, matrices as they are
(docs/math.md, 9). `learn` is a tuple of names, each a leaf of meta or the start of some, as in `Unrolled`.
Tensors are named by quantity, then parameter or leaf, as in "cosine/hyper.lr". Metasmoothness, cosines and
signs lie in [-1, 1]: 1 is agreement, 0 is chance. How to read them: docs/trust.md.
"""

import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metafop import leaf_names, tree
from metafop.diagnostics.preconditioning import unit, wide
from metafop.hypergradients.validation import batch_at, horizon
from metafop.optimizers.hyper import extremes
from metafop.protocols import Batches, Estimator, Trains
from metafop.types import Batch, Estimate, Meta, OuterLoss, Params


def metasmoothness(
    training: Trains,
    meta: Meta,
    carry: Any,
    batches: Batches,
    learn: tuple[str, ...],
    h: float = 0.01,
    direction: Meta | None = None,
) -> dict[str, Tensor]:
    """Return the empirical metasmoothness (Engstrom et al., 2025) of all parameters, and of each.

    θ_k = params after all batches with z + k h v,    k = 0, 1, 2,    d = |θ_2 - θ_0|
    metasmoothness = Σ d sign(θ_1 - θ_0) sign(θ_2 - θ_1) / Σ d

    NaN says that the parameters did not move, or not to where they are finite. This takes three trainings and
    differentiates none.

    training: what takes the steps, a `Training` or an `Online`.
    meta: where z starts.
    carry: where training starts.
    batches: a sequence with one for each step.
    learn: names of leaves of meta, or the starts of some: those that z moves.
    h: the size of a step in z, above zero (0.01).
    direction: v, a tree like meta (None, one for every number that is learned).

    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> meta, carry = training.init_meta(params, lr=0.1), training.init(params)
    >>> metafop.diagnostics.metasmoothness(training, meta, carry, 3 * [torch.ones(1)], ("lr",))
    {'metasmoothness': tensor(1.), 'metasmoothness/w': tensor(1.)}
    """
    if isinstance(h, bool) or not isinstance(h, int | float) or not 0 < h < math.inf:
        raise ValueError(f"metasmoothness takes an h above zero, got h={h!r}. Pass one such as 0.01.")
    steps = horizon(training, meta, carry, batches)
    leaves = _leaves("metasmoothness", training, meta, learn)
    ones = {name: torch.ones_like(leaf) for name, leaf in leaves.items()}
    along = ones if direction is None else _picked("metasmoothness", "direction", direction, leaves)

    def trained(k: int) -> Params:
        moved = {name: _moved(training, name, leaf, k * h * along[name]) for name, leaf in leaves.items()}
        changed, after = tree.replace(meta, moved), carry
        for t in range(steps):
            after, _ = training.step(changed, after, batch_at(batches, t))
        return tree.map(wide, after.params)

    start, middle, end = trained(0), trained(1), trained(2)
    sizes = {name: (end[name] - start[name]).abs() for name in start}
    signs = {name: (middle[name] - start[name]).sign() * (end[name] - middle[name]).sign() for name in start}
    agreeing = {name: (sizes[name] * signs[name]).sum() for name in start}
    whole = {name: size.sum() for name, size in sizes.items()}
    each = {f"metasmoothness/{name}": agreeing[name] / whole[name] for name in start}
    return {"metasmoothness": _sum(agreeing) / _sum(whole)} | each


def variance(
    training: Trains, meta: Meta, estimates: Iterable[Estimate], learn: tuple[str, ...]
) -> dict[str, Tensor]:
    """Return how far derivatives g_1 … g_n at one meta differ, such as those of n seeds.

    mean = Σ g / n,    standard_error = s / √n,    s² = Σ (g - mean)² / (n - 1)
    signal_to_noise = ‖mean‖ / ‖s‖, that of one estimate,
    cosine = mean over pairs of ⟨g_i, g_j⟩ / (‖g_i‖ ‖g_j‖)

    for each leaf; and the cosine of all leaves together.

    training: that which was differentiated; it says in which coordinates leaves are learned.
    meta: where it was differentiated.
    estimates: what an estimator returned, two or more.
    learn: names of leaves of meta, or the starts of some: those to compare.

    >>> training = Training(metafop.functional.plain(lambda params, batch: params["w"].sum()), SGD())
    >>> meta = training.init_meta({"w": torch.zeros(1)}, lr=0.5)
    >>> grads = [meta._replace(hyper=meta.hyper._replace(lr=torch.tensor(d))) for d in (2.0, 4.0, 6.0)]
    >>> estimates = [metafop.Estimate(torch.tensor(0.0), d_meta, (), None, {}) for d_meta in grads]
    >>> found = metafop.diagnostics.variance(training, meta, estimates, ("lr",))
    >>> found["mean/hyper.lr"], found["signal_to_noise/hyper.lr"]  # in log lr: 1, 2, 3
    (tensor(2.), tensor(2.))
    """
    estimates = list(estimates)
    if len(estimates) < 2 or not all(isinstance(estimate, Estimate) for estimate in estimates):
        kinds = sorted({type(estimate).__name__ for estimate in estimates})
        raise ValueError(
            f"variance takes two estimates or more, got {len(estimates)} of {', '.join(kinds) or 'nothing'}. "
            "Pass a list of what an estimator returns, one for each seed."
        )
    leaves = _leaves("variance", training, meta, learn)
    each = [_chained("variance", training, leaves, estimate.grads) for estimate in estimates]
    found = {"cosine": _cosine([_flat(g) for g in each])}
    for name, g in tree.stack(each).items():
        mean, deviation = g.mean(0), g.std(0)
        found[f"mean/{name}"] = mean
        found[f"standard_error/{name}"] = deviation / math.sqrt(len(each))
        found[f"signal_to_noise/{name}"] = tree.norm(mean) / tree.norm(deviation)
        found[f"cosine/{name}"] = _cosine(g)
    return found


def halves(
    estimator: Estimator,
    training: Trains,
    outer_loss: OuterLoss,
    meta: Meta,
    carry: Any,
    batches: Batches,
    learn: tuple[str, ...],
) -> dict[str, Tensor]:
    """Return how well the hypergradients a of batches 0, 2, 4, … and b of batches 1, 3, 5, … agree.

    cosine = ⟨a, b⟩ / (‖a‖ ‖b‖),    signs = mean of sign(a) sign(b)

    for each leaf, and for all together. Both start from `carry` and take ⌊T/2⌋ steps.

    estimator: any of `metafop.hypergradients` over many steps.
    training, outer_loss, meta, carry: what it is given.
    batches: a sequence of two or more, T in all.
    learn: names of leaves of meta, or the starts of some: those to compare.

    >>> from metafop.hypergradients import adjoint
    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] * batch).sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> meta, carry = training.init_meta(params, lr=0.1), training.init(params)
    >>> batches = [torch.tensor(x) for x in (1.0, 2.0, 3.0, -3.0)]  # w = -4 lr, and w = lr
    >>> end, learn = lambda carry: carry.params["w"].sum(), ("lr",)
    >>> metafop.diagnostics.halves(adjoint, training, end, meta, carry, batches, learn)["cosine"]
    tensor(-1.)
    """
    leaves = _leaves("halves", training, meta, learn)
    if not isinstance(batches, Sized) or not hasattr(batches, "__getitem__") or len(batches) < 2:
        found = len(batches) if isinstance(batches, Sized) else "no number of them"
        raise ValueError(
            f"halves takes a sequence of two batches or more, got {found} in a {type(batches).__name__}. "
            "Pass one for each step, such as list(batches)."
        )

    def derivative(first: int) -> leaf_names.Leaves:
        estimate = estimator(training, outer_loss, meta, carry, _EverySecond(batches, first))
        return _chained("halves", training, leaves, estimate.grads)

    even, odd = derivative(0), derivative(1)
    found = _agreement("", _flat(even), _flat(odd))
    for name in leaves:
        found |= _agreement(f"/{name}", even[name], odd[name])
    return found


@dataclass(frozen=True)
class _EverySecond:
    """Every second of the batches, from the first or from the second."""

    batches: Batches
    first: int

    def __len__(self) -> int:
        return len(self.batches) // 2

    def __getitem__(self, t: int) -> Batch:
        return batch_at(self.batches, self.first + 2 * t)


def _leaves(owner: str, training: Trains, meta: Meta, learn: tuple[str, ...]) -> leaf_names.Leaves:
    """Return the leaves that `learn` names, or refuse one that has no coordinate."""
    leaf_names.check(owner, learn)
    passing, named = leaf_names.times(meta), leaf_names.named(owner, learn, meta)
    leaves = {name: leaf for name, leaf in named.items() if name not in passing}
    for name, leaf in leaves.items():
        for place, number in extremes(name, leaf):
            if not leaf_names.domain(training, name).inside(number):
                raise ValueError(
                    f"{owner} cannot move {place} from {number:g}, on the boundary of its range. "
                    "Start inside, or name in learn only what can move."
                )
    if not leaves:
        raise ValueError(f"{owner} got only times, {learn!r}, which are not learned. Name other leaves.")
    return leaves


def _picked(owner: str, what: str, x: Meta, leaves: leaf_names.Leaves) -> leaf_names.Leaves:
    """Return the leaves of the same names of another tree, or refuse one that is not like meta."""
    named = tree.named(x)
    for name, leaf in leaves.items():
        if name not in named or named[name].shape != leaf.shape:
            found = f"one of shape {tuple(named[name].shape)}" if name in named else "none"
            raise ValueError(
                f"{owner} takes {what} with a {name} of shape {tuple(leaf.shape)}, as meta has it, "
                f"got {found}. Pass what was made with this meta."
            )
    return {name: named[name] for name in leaves}


def _moved(training: Trains, name: str, leaf: Tensor, change: Tensor) -> Tensor:
    """Return x(z + change)."""
    domain = leaf_names.domain(training, name)
    z = domain.coordinate(leaf)
    return domain.moved(leaf, z, z + change)


def _chained(owner: str, training: Trains, leaves: leaf_names.Leaves, grads: Meta) -> leaf_names.Leaves:
    """Return the derivatives in the coordinates of the leaves."""
    derivatives = _picked(owner, "grads", grads, leaves)
    return {name: leaf_names.domain(training, name).chain(x, derivatives[name]) for name, x in leaves.items()}


def _agreement(suffix: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"cosine{suffix}": _cosine([a, b]), f"signs{suffix}": (wide(a).sign() * wide(b).sign()).mean()}


def _cosine(vectors: Sequence[Tensor] | Tensor) -> Tensor:
    """Return the mean over pairs of ⟨u_i, u_j⟩ = (‖Σ u‖² - Σ ‖u‖²) / (n (n - 1)), u = x/‖x‖, or 0 for 0."""
    units, n = torch.stack([unit(x) for x in vectors]), len(vectors)
    return (units.sum(0).square().sum() - units.square().sum()) / (n * (n - 1))


def _flat(x: leaf_names.Leaves) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in x.values()])


def _sum(x: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(x.values())).sum()
