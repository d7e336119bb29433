"""The smallest problems on which Theorems 1 and 2 fail as printed, and what holds of them instead."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from experiments.paper.theory import theorem2
from experiments.paper.theory.problems import Problems, log_cosh
from experiments.paper.theory.theorem2 import RULES, Learned, Run

ORANGE, BLUE, GREEN, PURPLE = "#D55E00", "#0072B2", "#009E73", "#CC79A7"  # Okabe and Ito's
FAR, SLOW = 1e5, 0.02  # where log cosh is as good as linear, and a ρ with which P still grows for long
NEAR, FAST = 10.0, 1.5  # ρ K² > 1: P grows even when gradients turn back

Curves = dict[str, tuple[Tensor, str, str]]  # values by step, colour and line, by name


class Example(NamedTuple):
    """A quantity: what is printed of it, what it is; what it should read, and what it is then."""

    statement: str
    printed: float | str
    happens: float
    corrected: float | str
    then: float


@cache
def on_a_line(rule: str, start: float, rho: float, steps: int, limit: float = 0.1) -> Run:
    """Return a run of FOP on log cosh x: L = K = 1, the learning rate is 1, and M = 1 at the start."""
    problem = Problems(torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    x, meta_lr = torch.full_like(problem.curvature, start), problem.curvature.new_tensor([rho])
    return theorem2.follow(RULES[rule], log_cosh, problem, x, meta_lr, limit, steps)


def left(*diagonals: tuple[float, float]) -> float:
    """Return what steps of 1 with P = diag(…), one after another, leave of |θ|² from (0, 1)."""
    theta = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for p in diagonals:
        theta = theta - torch.tensor(p, dtype=torch.float64) * theta
    return theta.square().sum().item()


def huber(x: Tensor) -> Tensor:
    """Its slope is at most 1, so it is 1-Lipschitz; but it is 100-smooth."""
    return torch.where(x.abs() < 0.01, 50 * x**2, x.abs() - 0.005)


def rise(step: float) -> float:
    """Return by how much one step changes the Huber function at 0.1."""
    x = torch.tensor(0.1, dtype=torch.float64)
    return (huber(x - step * grad(huber)(x)) - huber(x)).item()


def theorem_1() -> dict[str, Example]:
    """f is |θ|²/2, with L = μ = 1, unless stated otherwise."""
    rho = 2 * 0.5 - 0.5**2
    shrinking = [(1.0, 0.5**k) for k in range(1, 201)]
    promise = torch.tensor([least for _, least in shrinking], dtype=torch.float64).neg().log1p().sum().exp()
    stays = left(*shrinking)
    return {
        # The corrected step is 1/λ = 2, and arrives.
        "scalar": Example(
            "f left after a step, P = 0.5", 1 - rho, (1 - rho * 0.5) ** 2, 0.0, (1 - 2 * 0.5) ** 2
        ),
        # f = (x² + 0.1 y²)/2 from (1, 0), then from (0, 1): ρ = 2·3 - 3² < 0, and μ should have been L.
        "proof": Example(
            "f left after a step of 1/L, P = 3 I", 1 + 0.1 * 3, (1 - 3.0) ** 2, 0.9, (1 - 0.1) ** 2
        ),
        # Corrected, P is positive definite: here diag(1, 0.1).
        "semidefinite": Example(
            "f left after 100 steps, P = diag(1, 0)",
            "→ 0",
            left(*[(1, 0)] * 100),
            0.9**100,
            left(*[(1, 0.1)] * 100),
        ),
        # The corrected rates 1 - λ_min/λ_max multiply to more than zero: they promise no more than happens.
        "changing": Example("f left after 200 steps, P = diag(1, 2^−k)", "→ 0", stays, promise.item(), stays),
        "lipschitz": Example("change of a Huber function in a step", -0.5, rise(1.0), -0.005, rise(0.01)),
    }


def theorem_2() -> dict[str, Example]:
    """ρ is 0.02 and log cosh starts from 1e5 unless stated otherwise; or ρ is 1.5, from 10. p∞ is 0.1."""
    turn = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)  # g pᵀ + p gᵀ for g ⟂ p
    grown = theorem2.norm(torch.eye(2, dtype=torch.float64) + SLOW * turn).item()
    free = on_a_line("plain", FAR, SLOW, steps=100).log_norm[-1].exp().item()  # M has moved 99 times
    raw, rescaled = (on_a_line(rule, FAR, SLOW, steps=200).gamma[-1].item() for rule in ("raw", "rescaled"))
    lost, found = (on_a_line(rule, NEAR, FAST, steps=200).distance[-1].item() for rule in ("raw", "rescaled"))
    bound, x = (1 + 2 * SLOW) ** 2, torch.tensor(1000.0, dtype=torch.float64)
    flat = (0.5 * x.tanh() ** 2 / (x - math.log(2))).item()  # far out log cosh x = x - log 2, and no μ serves
    return {
        "orthogonal": Example("‖P‖ after a step, g ⟂ p", 1.0, grown, bound, grown),
        "norm": Example("‖P‖ after 100 steps on log cosh", 1 + 99 * SLOW, free, bound**99, free),
        "gamma": Example("γ after 200 steps on log cosh", "→ 0.1", raw, "→ 0.1", rescaled),
        "not_pl": Example("½ ‖∇J‖² / J at 1000 on log cosh", "≥ μ > 0", flat, "≥ 0", flat),
        "diverges": Example("‖θ‖ after 200 steps on log cosh, ρ = 1.5", "→ 0", lost, "→ 0", found),
    }


def norm_curves() -> Curves:
    """‖P‖ on log cosh from far away, with its bounds."""
    free = on_a_line("plain", FAR, SLOW, steps=100)
    one = torch.ones(1, dtype=torch.float64)
    bounds = theorem2.bounds(Learned(free, one, SLOW * one))
    return {
        "‖P‖ of FOP": (free.log_norm.exp(), "black", "-"),
        "(1 + 2ρεK²)^(2t), corrected": (bounds.corrected.exp(), BLUE, "--"),
        "1 + tρK², printed": (bounds.printed.exp(), ORANGE, "--"),
    }


def gamma_curves() -> Curves:
    """γ(t) on log cosh, by the rule by which M is learned."""
    far = {rule: on_a_line(rule, FAR, SLOW, steps=200).gamma for rule in ("raw", "rescaled", "through")}
    lost = on_a_line("raw", NEAR, FAST, steps=200).gamma
    return {
        "raw M, as printed": (far["raw"], ORANGE, "-"),
        "raw M, from 10, ρ = 1.5: θ diverges": (lost, PURPLE, "-"),
        "rescaled M": (far["rescaled"], BLUE, "-"),
        "through γ (the library's Rescaled)": (far["through"], GREEN, "--"),
    }
