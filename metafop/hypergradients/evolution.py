"""Evolution: no derivative at all, only the losses of particles that train with a meta moved a little."""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap

from metafop import leaf_names, tree
from metafop.hypergradients.checks.leaves import check_leaves_used
from metafop.hypergradients.forward import left_out
from metafop.hypergradients.inputs import inputs_of
from metafop.hypergradients.outer_loss import check_dependence, reads_meta, value_of
from metafop.hypergradients.validation import (
    accepted,
    batch_at,
    check_progress,
    explained_errors,
    horizon,
)
from metafop.protocols import Batches, Domain, Trains
from metafop.twice_differentiable import TwiceDifferentiable
from metafop.types import Estimate, Meta, OuterLoss, Progress


class EvolutionCarry(NamedTuple):
    """All particles: the next window goes on from them.

    carries: theirs, stacked: those that add perturbations, then those that subtract.
    perturbations: what each pair has added up since the start, ξ, by leaf; `()` before the first window.
    rng: the state of the generator that draws them.
    """

    carries: Any
    perturbations: leaf_names.Leaves | tuple[()]
    rng: Tensor


@dataclass(frozen=True)
class Evolution:
    """Persistent evolution strategies (Vicol, Metz & Sohl-Dickstein, 2021), in antithetic pairs.

    ε ~ N(0, σ²),    ξ' = ξ + ε,    L± = outer loss after a window with z ± ε
    ∂value/∂z ≈ mean over pairs of ξ' (L+ - L-) / (2σ²)    (docs/math.md, 23)

    Every particle goes on from its own last window. As ξ remembers them all, this estimates the derivative
    through all steps so far, without the bias of one that sees a single window; and as it is that of a loss
    smoothed by perturbations, it stays moderate where derivatives explode. It is noisy:
    `info["standard_error"]` says how much. It starts from `evolution.init(carry, generator)`.

    z is the coordinate in which a leaf is learned: log lr, logit momentum, matrices as they are. What has
    none is not perturbed: a value on the boundary of its range, the time of a `Rescaled` family. A pair is
    left out while one of its losses is not finite. Notes say so.

    learn: names of leaves of meta, or the starts of some, as for `Unrolled` (None, all).
    pairs: how many antithetic pairs of particles train side by side, 2 or more (32).
    sigma: σ, in the coordinate z, above zero (0.01).
    progress: called after each step of all particles, as by `Adjoint`; of each, where vmap fails (None).

    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> meta, carry = training.init_meta(params, lr=0.25), training.init(params)
    >>> evolution, end = Evolution(pairs=1000), lambda carry: carry.params["w"].sum()
    >>> state = evolution.init(carry, torch.Generator().manual_seed(0))
    >>> first = evolution(training, end, meta, state, [torch.ones(1)])
    >>> second = evolution(training, end, meta, first.carry, [torch.ones(1)])
    >>> error = second.grads.hyper.lr - 2  # w = 1 - (1 - 2 lr)², through both windows
    >>> bool(error.abs() < 3 * second.info["standard_error"].hyper.lr)
    True
    """

    learn: tuple[str, ...] | None = None
    pairs: int = 32
    sigma: float = 0.01
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_progress("Evolution", self.progress)
        if self.learn is not None:
            leaf_names.check("Evolution", self.learn)
        if not isinstance(self.pairs, int) or self.pairs < 2:
            raise ValueError(
                f"Evolution takes two pairs or more, to see how far they differ, got pairs={self.pairs!r}. "
                "Pass an integer, such as 32."
            )
        if not 0 < self.sigma < math.inf:
            raise ValueError(
                f"Evolution takes a sigma above zero, got {self.sigma!r}. Pass one such as 0.01."
            )

    def init(self, carry: Any, generator: Generator) -> EvolutionCarry:
        """Return particles that start from `carry`, with a generator of their own that `generator` seeds."""
        if not isinstance(generator, Generator):
            raise TypeError(
                f"evolution.init takes a torch.Generator, got {generator!r}. "
                "Pass torch.Generator().manual_seed(seed)."
            )
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        own = Generator().manual_seed(seed)
        return EvolutionCarry(tree.stack(2 * self.pairs * [carry]), (), own.get_state())

    def check_learnable(self, names: tuple[str, ...]) -> None:
        """Refuse to learn leaves of these `names` if there is one that `learn` does not name."""
        if leaf_names.names_start(names):
            raise ValueError(
                "Unrolled learns where a run starts, in which Evolution gives no derivative. Use adjoint."
            )
        leaf_names.check_learnable("Evolution", self.learn, names)

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        self._check_carry(carry)
        meta, carries = accepted(meta, carry.carries)
        first = tree.map(lambda x: x[0], carries)
        steps = horizon(training, meta, first, batches)
        check_leaves_used(training, inputs_of(meta, first), outer_loss, batches)
        leaves, notes = self._leaves(training, meta)
        noise, rng = self._drawn(leaves, carry.rng)
        sums = _added(carry.perturbations, noise)

        def unrolled(noise: leaf_names.Leaves, carry: Any) -> tuple[Tensor, Any, Tensor]:
            moved, values = tree.replace(meta, {k: leaf.moved(noise[k]) for k, leaf in leaves.items()}), []
            for t in range(steps):
                seen = training.evaluate(moved, carry, batch_at(batches, t))
                carry, _ = training.advance(moved, carry, seen)
                values.append(seen.value)
                if self.progress is not None:
                    self.progress("forward", t + 1, steps)
            value = value_of(outer_loss, moved, carry)
            _check_reads_carry(outer_loss, meta, carry, value)
            return value, carry, torch.stack(values)

        both = {name: torch.cat([x, -x]) for name, x in noise.items()}
        with explained_errors(), TwiceDifferentiable():  # nor has fused attention a rule for vmap
            (losses, carries, values), slow = _for_each(unrolled, both, carries)

        plus, minus = losses.chunk(2)
        slopes = (plus - minus) / (2 * self.sigma**2)
        kept, zeros = slopes.isfinite(), tree.zeros_like(meta)
        each = {name: leaf.chained(_column(slopes, sums[name]) * sums[name]) for name, leaf in leaves.items()}
        grads = tree.replace(zeros, {name: _mean(x, kept) for name, x in each.items()})
        errors = tree.replace(zeros, {name: _standard_error(x, kept) for name, x in each.items()})
        overflow, note = _overflow(values, kept)
        info = {
            "values": _mean(values, values.isfinite()),
            "standard_error": errors,
            "overflow": torch.tensor(overflow),
            "notes": tuple(note for note in (*notes, slow, note) if note),
        }
        return Estimate(_mean((plus + minus) / 2, kept), grads, (), EvolutionCarry(carries, sums, rng), info)

    def _check_carry(self, carry: Any) -> None:
        if not isinstance(carry, EvolutionCarry):
            raise TypeError(
                f"Evolution takes the particles of an EvolutionCarry, got a {type(carry).__name__}. "
                "Pass evolution.init(carry, generator)."
            )
        particles = len(tree.leaves(carry.carries)[0])
        if particles != 2 * self.pairs:
            raise ValueError(
                f"Evolution(pairs={self.pairs}) has {2 * self.pairs} particles, but this EvolutionCarry "
                f"holds {particles}. Start again with evolution.init(carry, generator)."
            )

    def _leaves(self, training: Trains, meta: Meta) -> tuple[dict[str, _Leaf], list[str]]:
        """Return the leaves that are perturbed, and what is to be said of the others."""
        learned = tree.named(meta) if self.learn is None else leaf_names.named("Evolution", self.learn, meta)
        passing = leaf_names.times(meta)
        leaves = {k: _Leaf(x, leaf_names.domain(training, k)) for k, x in learned.items() if k not in passing}
        stuck = [k for k, leaf in leaves.items() if tree.is_surely(~leaf.inside.all())]
        if all(tree.is_surely(~leaf.inside.any()) for leaf in leaves.values()):
            raise ValueError(
                f"Evolution has nothing to perturb: {', '.join(learned)} lie on the boundary of their range, "
                "or are times, which pass. Name something in learn that can move."
            )
        zeros = {
            "what lies on the boundary of its range": stuck,
            "times, which pass": passing & learned.keys(),
        }
        notes = [
            f"Zeros stand for the derivatives in {k}: {', '.join(sorted(v))}." for k, v in zeros.items() if v
        ]
        return leaves, [left_out(meta, learned), *notes]

    def _drawn(self, leaves: dict[str, _Leaf], state: Tensor) -> tuple[leaf_names.Leaves, Tensor]:
        """Return ε for each pair, and the state of the generator after."""
        rng = Generator()
        rng.set_state(state.cpu())
        noise = {name: leaf.drawn(self.pairs, self.sigma, rng) for name, leaf in leaves.items()}
        return noise, rng.get_state()


evolution = Evolution()


class _Leaf(NamedTuple):
    """A leaf of meta, and the domain that gives it a coordinate z."""

    value: Tensor
    domain: Domain

    @property
    def inside(self) -> Tensor:
        """Whether each number has a coordinate: on the boundary of the domain it has none."""
        return self.domain.coordinate(self.value).isfinite()

    def drawn(self, pairs: int, sigma: float, rng: Generator) -> Tensor:
        """Return ε ~ N(0, σ²) for each pair."""
        # Always on the CPU, whose generator gives the same numbers wherever training runs.
        noise = torch.randn(pairs, *self.value.shape, dtype=self.value.dtype, generator=rng)
        return torch.where(self.inside, sigma * noise.to(self.value.device), 0.0)

    def moved(self, noise: Tensor) -> Tensor:
        """Return x(z + ε)."""
        z = self.domain.coordinate(self.value)
        return torch.where(self.inside, self.domain.moved(self.value, z, z + noise), self.value)

    def chained(self, derivative: Tensor) -> Tensor:
        """Return the derivative in x, given that in z: divided by dx/dz."""
        slope = self.domain.chain(self.value, torch.ones_like(self.value))
        return torch.where(self.inside, (derivative / slope).to(self.value.dtype), 0.0)


def _added(perturbations: leaf_names.Leaves | tuple[()], noise: leaf_names.Leaves) -> leaf_names.Leaves:
    if not perturbations:
        return noise
    if perturbations.keys() != noise.keys():
        raise ValueError(
            f"This EvolutionCarry has perturbations of {', '.join(perturbations)}, but {', '.join(noise)} "
            "are learned. Start again with evolution.init(carry, generator)."
        )
    return {name: perturbations[name] + x for name, x in noise.items()}


def _for_each(function: Callable[..., Any], *stacked: Any) -> tuple[Any, str]:
    """Return `vmap(function)(*stacked)`; one after another, and a sentence, where torch cannot vmap."""
    try:
        return vmap(function)(*stacked), ""
    except RuntimeError as error:
        if not any(known in str(error) for known in _NOT_BATCHED):
            raise
        reason = str(error).split(". ")[0]
    particles = range(len(tree.leaves(stacked)[0]))
    results = [function(*tree.map(lambda x, i=i: x[i], stacked)) for i in particles]
    return tree.stack(results), f"Trained one particle after another, because vmap failed: {reason}."


# What torch says of operations that it cannot batch: fused ones, functions without a rule, and item().
_NOT_BATCHED = ("atching rule not implemented", "You tried to vmap over", "calling .item()")


def _check_reads_carry(outer_loss: OuterLoss, meta: Meta, carry: Any, value: Tensor) -> None:
    """Refuse an outer loss that is the same for all particles, but for meta: one by one they cannot tell."""
    if tree.is_transforming():
        of_carry = value_of(outer_loss, meta, carry) if reads_meta(outer_loss) else value
        check_dependence(tree.is_batched(of_carry))


def _column(x: Tensor, beside: Tensor) -> Tensor:
    """Return x with as many dimensions as `beside`, which has x's and then others."""
    return x.reshape(*x.shape, *[1] * (beside.dim() - x.dim()))


def _mean(x: Tensor, kept: Tensor) -> Tensor:
    """Return the mean over the first dimension of what is kept."""
    return torch.where(_column(kept, x), x, 0.0).sum(0) / kept.sum(0)


def _standard_error(x: Tensor, kept: Tensor) -> Tensor:
    """Return that of the mean: √(Σ (x - mean)² / (n (n - 1)))."""
    return (_mean((x - _mean(x, kept)).square(), kept) / (kept.sum() - 1)).sqrt()


def _overflow(values: Tensor, kept: Tensor) -> tuple[int, str]:
    """Return the step at which a loss was not finite first, or -1, and a sentence."""
    plus, minus = values.isfinite().chunk(2)
    finite = torch.cat([plus & minus, kept[:, None]], 1)  # (pairs, T + 1)
    if not tree.is_surely(~finite.all()):
        return -1, ""
    step, steps = int((~finite.all(0)).nonzero()[0]), values.shape[1]
    seen, out = int((~finite.all(1)).sum()), int((~kept).sum())
    first = f"at step {step} of {steps}" if step < steps else f"after all {steps} steps"
    none = "" if kept.any() else ", so that there is none, and NaN stands for it"
    return step, (
        f"In {seen} of {len(kept)} pairs a loss is not finite, first {first}: {out} are left out of the "
        f"estimate{none}. Take a smaller sigma or lr, and start again with evolution.init(carry, generator)."
    )
