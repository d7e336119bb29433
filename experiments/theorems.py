"""Theorems 1 and 2, numbered as in docs/errata.md: random problems, what is claimed of them, and runs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap
from torch.nn.functional import softplus

from metafop import SGD, Dense, Meta, Online, Preconditioner, Rescaled, SGDHyper, Training
from metafop.functional import plain


class Problems(NamedTuple):
    """J(θ) = Σ hᵢ φ(qᵢᵀθ), one a row, with minimum 0 and L = max h; quadratics are PL with μ = min h > 0."""

    basis: Tensor  # (problems, n, n), with columns q
    curvature: Tensor  # (problems, n), h ≥ 0: zero where J is flat

    @property
    def extremes(self) -> tuple[Tensor, Tensor]:
        """μ and L."""
        h = self.curvature
        return h.where(h > 0, torch.inf).amin(1), h.amax(1)

    @property
    def factor(self) -> Tensor:
        """M with M Mᵀ = Σ hᵢ qᵢ qᵢᵀ."""
        return self.basis * self.curvature.sqrt()[:, None]


Function = Callable[[dict[str, Tensor], Problems], Tensor]


def quadratic(params: dict[str, Tensor], problem: Problems) -> Tensor:
    """φ(y) = y² / 2."""
    return 0.5 * (problem.curvature * (params["x"] @ problem.basis).square()).sum()


def log_cosh(params: dict[str, Tensor], problem: Problems) -> Tensor:
    """φ(y) = log cosh y: convex, L-smooth and ‖∇J‖ < ‖h‖ everywhere, as Theorem 2 assumes; but not PL."""
    y = (params["x"] @ problem.basis).abs()
    return (problem.curvature * (y + softplus(-2 * y) - math.log(2))).sum()


def spectral(
    count: int, n: int, low: float, high: float, generator: Generator, singular: bool = False
) -> Problems:
    """Draw symmetric matrices with eigenvalues in [low, high]; of singular ones, up to n - 1 are zero."""
    basis = torch.linalg.qr(torch.randn(count, n, n, generator=generator, dtype=torch.float64)).Q
    values = low + (high - low) * torch.rand(count, n, generator=generator, dtype=torch.float64)
    if singular:
        rank = torch.randint(1, n, (count, 1), generator=generator)
        values = values.where(torch.arange(n) < rank, 0.0)
    return Problems(basis, values)


def mixed(count: int, n: int, generator: Generator) -> Problems:
    """Draw problems for Theorem 2, every other one singular, all with L = 1."""
    definite = spectral(count, n, 0.1, 1.0, generator)
    singular = spectral(count, n, 0.1, 1.0, generator, singular=True)
    odd = torch.arange(count)[:, None] % 2 == 1
    h = singular.curvature.where(odd, definite.curvature)
    return Problems(definite.basis, h / h.amax(1, keepdim=True))


class Claim(NamedTuple):
    """Of f - f*, θ' = θ - step P ∇f leaves at most `rate`: one for each problem."""

    step: Tensor
    rate: Tensor


def claims(problems: Problems, eigenvalues: Tensor) -> dict[str, Claim]:
    """Return Theorem 1 as printed, what its proof shows where ρ > 0, and the statement that always holds."""
    (mu, smooth), least, most = problems.extremes, eigenvalues.amin(1), eigenvalues.amax(1)
    rho = (2 * least - most**2) / smooth
    return {
        "printed": Claim(rho, 1 - mu * rho),
        "proof": Claim(1 / smooth, 1 - mu * rho),
        "corrected": Claim(1 / (smooth * most), 1 - mu * least / (smooth * most)),
    }


def worst(problems: Problems, m: Tensor, step: Tensor) -> Tensor:
    """Return what one step with P = M Mᵀ leaves of f - f* at worst: max (1 - step λ)², λ ≠ 0 of P ∇²f."""
    h = problems.curvature
    spectrum = torch.linalg.svdvals(h.sqrt()[..., None] * (problems.basis.mT @ m)).square()
    moves = torch.arange(h.shape[1]) < (h > 0).sum(1, keepdim=True)  # descending: zeros are last
    return (1 - step[:, None] * spectrum).square().where(moves, 0.0).amax(1)


def descend(problems: Problems, m: Tensor, step: Tensor, start: Tensor, steps: int) -> Tensor:
    """Return f along the run, (steps + 1, problems)."""
    training = Training(plain(quadratic), SGD(), {"x": Dense()})
    meta = Meta(SGDHyper(step, torch.zeros_like(step)), {"x": m})
    carry, values = vmap(lambda x: training.init({"x": x}))(start), []
    for _ in range(steps + 1):
        carry, info = vmap(training.step)(meta, carry, problems)
        values.append(info["value"])
    return torch.stack(values)


def fails_along(values: Tensor, rate: Tensor) -> Tensor:
    """Return whether f is ever above its claim, as long as that is above rounding."""
    left = rate ** torch.arange(len(values), dtype=rate.dtype)[:, None]
    return ((values > (1 + 1e-9) * left * values[0]) & (left > 1e-20)).any(0)


class Descents(NamedTuple):
    """Theorem 1 on one kind of quadratics: claims, what one step leaves at worst, f along runs; by claim."""

    claims: dict[str, Claim]
    worst: dict[str, Tensor]
    values: dict[str, Tensor]  # (steps + 1, quadratics)

    @property
    def usable(self) -> Tensor:
        """Whether the printed step descends: ρ > 0."""
        return self.claims["printed"].step > 0

    def fails(self, name: str, among: Tensor) -> dict[str, int]:
        rate = self.claims[name].rate
        at_worst, along = self.worst[name] > rate + 1e-12, fails_along(self.values[name], rate)
        return {"worst": int((at_worst & among).sum()), "run": int((along & among).sum())}


def norm(m: Tensor) -> Tensor:
    """Return ‖M Mᵀ‖₂."""
    return torch.linalg.svdvals(m)[..., 0].square()


def scale(m: Tensor, limit: float, t: int) -> Tensor:
    """Return γ(t) / ‖P‖₂, γ(t) = δ(t) ‖P‖₂ + (1 - δ(t)) p∞, δ(t) = 1/t²."""
    return 1 / t**2 + (1 - 1 / t**2) * limit / norm(m)


@dataclass(frozen=True)
class Held:
    """γ(t) P / ‖P‖₂, P = M Mᵀ, with M learned as if P were not rescaled: Theorem 2 as printed."""

    limit: float
    time: int

    def init(self, param: Tensor, generator: Generator | None = None) -> Tensor:
        return Dense().init(param, generator)

    def apply(self, m: Tensor, grad: Tensor) -> Tensor:
        return scale(m, self.limit, self.time) * Dense().apply(m, grad)

    def pullback(self, m: Tensor, grad: Tensor, cotangent: Tensor) -> Tensor:
        return Dense().pullback(m, grad, cotangent)


def fop(function: Function, family: Preconditioner) -> Online:
    """Return Algorithm 1 with M updated first: SGD on M by the closed form, without the library's guard."""
    return Online(Training(plain(function), SGD(), {"x": family}), SGD(), guards=())


def learn_rescaled(function: Function, limit: float, t: int) -> Online:
    def bound(meta: Meta) -> Meta:
        m = meta.precond["x"]
        return Meta(meta.hyper, {"x": scale(m, limit, t).sqrt() * m})

    return replace(fop(function, Dense()), bounds=(bound,))


class Way(NamedTuple):
    """How M is learned on: who takes step t, given p∞; and the norm of the P that it takes it with."""

    label: str
    online: Callable[[Function, float, int], Online]
    gamma: Callable[[Any, float, int], Tensor]


WAYS = {
    "plain": Way("no γ", lambda f, limit, t: fop(f, Dense()), lambda m, limit, t: norm(m)),
    "raw": Way(
        "raw M",
        lambda f, limit, t: fop(f, Held(limit, t)),
        lambda m, limit, t: norm(m) / t**2 + (1 - 1 / t**2) * limit,
    ),
    "rescaled": Way("rescaled M", learn_rescaled, lambda m, limit, t: norm(m)),
    "through": Way(  # its norm is Frobenius'
        "through γ",
        lambda f, limit, t: fop(f, Rescaled(Dense(), limit)),
        lambda m, limit, t: vmap(Rescaled(Dense(), limit).norm)(m),
    ),
}


class Run(NamedTuple):
    """What was seen at each step, (steps, runs)."""

    value: Tensor  # J before the step
    slope: Tensor  # ‖∇J‖ before the step
    turn: Tensor  # |gᵀp|, of this gradient and the last
    log_norm: Tensor  # log ‖M Mᵀ‖₂, of what is learned: the norm itself may overflow
    spread: Tensor  # λ_max / λ_min of P
    gamma: Tensor  # the norm of the P that the step is taken with
    distance: Tensor  # ‖θ‖ after the step


def follow(
    way: Way, function: Function, problems: Problems, start: Tensor, meta_lr: Tensor, limit: float, steps: int
) -> Run:
    """Learn P from M = I while descending, each problem with its own start and meta learning rate."""

    def begin(x: Tensor, rho: Tensor) -> tuple[Any, Any]:
        online = way.online(function, limit, 1)
        training: Any = online.training
        meta, carry = training.meta({"x": x}, SGD().hyper(lr=1.0)), training.init({"x": x})
        return online.meta(meta, SGD().hyper(lr=rho)), online.init(meta, carry)

    steer, state = vmap(begin)(start, meta_lr)
    seen, p = [], torch.zeros_like(start)
    for t in range(1, steps + 1):
        state, info = vmap(way.online(function, limit, t).step)(steer, state, problems)
        m, g = state.meta.precond["x"], state.last_seen.grads["x"]
        singular = torch.linalg.svdvals(m if isinstance(m, Tensor) else m.inner)
        seen.append(
            (
                info["value"],
                torch.linalg.vector_norm(g, dim=1),
                (g * p).sum(1).abs(),
                2 * singular[:, 0].log(),
                (singular[:, 0] / singular[:, -1]).square(),
                way.gamma(m, limit, t),
                torch.linalg.vector_norm(state.params["x"], dim=1),
            )
        )
        p = g
    return Run(*(torch.stack(column) for column in zip(*seen, strict=True)))


class Learned(NamedTuple):
    """Runs, with the K and the ρ of each."""

    run: Run
    most: Tensor
    meta_lr: Tensor

    def at(self, rho: float) -> "Learned":
        here = self.meta_lr == rho
        return Learned(Run(*(x[:, here] for x in self.run)), self.most[here], self.meta_lr[here])


class Bounds(NamedTuple):
    """log of what ‖P‖₂ is said to stay below, (steps, runs), for P = I at the start."""

    middle: Tensor  # 1 + ρ Σ |gᵀp|, as printed
    printed: Tensor  # 1 + t ρ K², as printed
    corrected: Tensor  # (1 + 2 ρ ε K²)^(2t), ε = 1


def bounds(learned: Learned) -> Bounds:
    """t counts how often M has moved, which it does not in the first step."""
    run, most, meta_lr = learned
    t = torch.arange(len(run.value), dtype=most.dtype)[:, None]
    return Bounds(
        (meta_lr * run.turn.cumsum(0)).log1p(),
        (t * meta_lr * most**2).log1p(),
        2 * t * (2 * meta_lr * most**2).log1p(),
    )


def breaks_what_holds(way: str, learned: Learned, limit: float) -> Tensor:
    """Return whether a run ever breaks what is true of its way of learning on, or of all: it never should.

    Of all: J does not rise on a step with γ ≤ 2/L, L = 1. Of M learned on from itself: the corrected bound.
    Of M learned on from what was rescaled: γ(t) ≤ δ(t) (1 + 2 ρ ε K²)² γ(t-1) + (1 - δ(t)) p∞.
    """
    run, most, meta_lr = learned
    wrong = ((run.value[1:] > run.value[:-1] + 1e-12 * run.value[0]) & (run.gamma[:-1] <= 2)).any(0)
    if way in ("plain", "raw"):
        wrong |= (run.log_norm > bounds(learned).corrected + 1e-9).any(0)
    if way == "rescaled":
        delta = torch.arange(2, len(run.value) + 1, dtype=most.dtype)[:, None] ** -2
        grown = (1 + 2 * meta_lr * most**2) ** 2 * run.gamma[:-1]
        wrong |= (run.gamma[1:] > (1 + 1e-9) * (delta * grown + (1 - delta) * limit)).any(0)
    return wrong
