"""Theorem 2: the norm of a learned P and the convergence with it, as printed and corrected."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap

from experiments.paper.theory.problems import Function, Problems
from metafop import SGD, Dense, Meta, Online, Preconditioner, Rescaled, Training
from metafop.functional import plain


def norm(m: Tensor) -> Tensor:
    """Return ‖M Mᵀ‖₂."""
    return torch.linalg.svdvals(m)[..., 0].square()


def scale(m: Tensor, limit: float, t: int) -> Tensor:
    """Return γ(t) / ‖P‖₂, γ(t) = δ(t) ‖P‖₂ + (1 - δ(t)) p∞, δ(t) = 1/t²."""
    return 1 / t**2 + (1 - 1 / t**2) * limit / norm(m)


@dataclass(frozen=True)
class RescaledInStep:
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


class Rule(NamedTuple):
    """How M is learned: the learner that takes step t, given p∞; and the norm of its P in that step."""

    label: str
    online: Callable[[Function, float, int], Online]
    gamma: Callable[[Any, float, int], Tensor]


RULES = {
    "plain": Rule("no γ", lambda f, limit, t: fop(f, Dense()), lambda m, limit, t: norm(m)),
    "raw": Rule(
        "raw M",
        lambda f, limit, t: fop(f, RescaledInStep(limit, t)),
        lambda m, limit, t: norm(m) / t**2 + (1 - 1 / t**2) * limit,
    ),
    "rescaled": Rule("rescaled M", learn_rescaled, lambda m, limit, t: norm(m)),
    "through": Rule(  # its norm is Frobenius'
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
    rule: Rule,
    function: Function,
    problems: Problems,
    start: Tensor,
    meta_lr: Tensor,
    limit: float,
    steps: int,
) -> Run:
    """Learn P from M = I while descending, each problem with its own start and meta learning rate."""

    def begin(x: Tensor, rho: Tensor) -> tuple[Any, Any]:
        online = rule.online(function, limit, 1)
        training: Any = online.training
        meta, carry = training.init_meta({"x": x}, lr=1.0), training.init({"x": x})
        return online.init_meta(meta, lr=rho), online.init(meta, carry)

    outer_meta, state = vmap(begin)(start, meta_lr)
    seen, p = [], torch.zeros_like(start)
    for t in range(1, steps + 1):
        state, info = vmap(rule.online(function, limit, t).step)(outer_meta, state, problems)
        m, g = state.meta.precond["x"], state.last_seen.grads["x"]
        singular = torch.linalg.svdvals(m if isinstance(m, Tensor) else m.inner)
        seen.append(
            (
                info["value"],
                torch.linalg.vector_norm(g, dim=1),
                (g * p).sum(1).abs(),
                2 * singular[:, 0].log(),
                (singular[:, 0] / singular[:, -1]).square(),
                rule.gamma(m, limit, t),
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
    """log of the upper bounds of ‖P‖₂, (steps, runs), for P = I at the start."""

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


def breaks_corrected(rule: str, learned: Learned, limit: float) -> Tensor:
    """Return whether a run ever breaks what is true of its rule, or of all rules: it never should.

    Of all: J does not rise on a step with γ ≤ 2/L, L = 1. Of rules that learn M itself: the corrected bound.
    Of the rule that learns the rescaled M: γ(t) ≤ δ(t) (1 + 2 ρ ε K²)² γ(t-1) + (1 - δ(t)) p∞.
    """
    run, most, meta_lr = learned
    wrong = ((run.value[1:] > run.value[:-1] + 1e-12 * run.value[0]) & (run.gamma[:-1] <= 2)).any(0)
    if rule in ("plain", "raw"):
        wrong |= (run.log_norm > bounds(learned).corrected + 1e-9).any(0)
    if rule == "rescaled":
        delta = torch.arange(2, len(run.value) + 1, dtype=most.dtype)[:, None] ** -2
        grown = (1 + 2 * meta_lr * most**2) ** 2 * run.gamma[:-1]
        wrong |= (run.gamma[1:] > (1 + 1e-9) * (delta * grown + (1 - delta) * limit)).any(0)
    return wrong
