"""Theorem 1: the rate of preconditioned gradient descent, as printed, as proved, and corrected."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from experiments.paper.theory.problems import Problems, quadratic
from metafop import SGD, Dense, Meta, SGDHyper, Training
from metafop.functional import plain


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
