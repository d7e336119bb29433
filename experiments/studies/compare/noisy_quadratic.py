"""Short-horizon bias where the expectation is known: the sign of dJ/dlr by horizon."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Generator, Tensor
from torch.func import grad, vmap

from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from metafop import SGD, Carry, Training
from metafop.functional import plain
from metafop.hypergradients import adjoint
from metafop.tensorboard import Logger


@dataclass(frozen=True)
class Quadratic:
    """SGD on the noisy quadratic of Wu et al. (2018): J(θ) = ½ Σ hᵢ (θᵢ - cᵢ)², c drawn anew for every step.

    c has mean 0 and deviation 1, h falls from 1 to 1 / condition. What counts is ½ Σ hᵢ E θᵢ², the loss above
    its floor, after T steps.
    """

    dimensions: int = 50  # numbers in θ
    condition: float = 1000.0  # the largest of h over the smallest
    horizons: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200)  # T
    samples: int = 1000  # runs, each with its own noise
    race: int = 500  # steps that greedy and fixed learning rates are compared over

    @property
    def ticks(self) -> int:
        return len(SITUATIONS) * len(self.horizons)

    @property
    def curvature(self) -> Tensor:
        exponents = torch.linspace(0, 1, self.dimensions, dtype=torch.float64)
        return torch.tensor(self.condition, dtype=torch.float64) ** -exponents


class Situation(NamedTuple):
    """Where dJ/dlr is measured: every θᵢ = distance, then so many steps with that learning rate."""

    label: str
    lr: float
    distance: float
    before: int


BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"  # Okabe and Ito's, for the colour-blind
SITUATIONS = {
    "start": Situation("Start, near the noise floor", 0.5, 1.0, 0),
    "middle": Situation("Middle: steep directions done, flat ones not", 0.3, 10.0, 100),
}


class Slopes(NamedTuple):
    """dJ/dlr by horizon: by adjoint, (horizons, samples); its expectation for every T up to the longest."""

    sampled: Tensor
    expected: Tensor

    @property
    def means(self) -> Tensor:
        return self.sampled.mean(1)

    @property
    def errors(self) -> Tensor:
        """The standard errors of the means."""
        return self.sampled.std(1) / self.sampled.shape[1] ** 0.5

    @property
    def flip(self) -> int | None:
        """The first T for which the learning rate should change in the other direction than for T = 1."""
        turned = (self.expected.sign() != self.expected[0].sign()).nonzero()
        return int(turned[0]) + 1 if len(turned) else None


class Trajectory(NamedTuple):
    """Expected loss and learning rate by step."""

    losses: Tensor
    lrs: Tensor


def spread(lr: Tensor, h: Tensor, start: Tensor, steps: Tensor | int) -> Tensor:
    """Return E θ² after some steps: ρᵀ s + (1 - ρᵀ) floor, ρ = (1 - lr h)², floor = (lr h)² / (1 - ρ)."""
    rho = (1 - lr * h) ** 2
    return rho**steps * start + (1 - rho**steps) * (lr * h) ** 2 / (1 - rho)


def measure(settings: Quadratic, generator: Generator, tick: Callable[[str], None]) -> dict[str, Slopes]:
    return {
        name: measure_slopes(settings, s, generator, lambda: tick("noisy quadratic"))
        for name, s in SITUATIONS.items()
    }


def measure_slopes(
    settings: Quadratic, situation: Situation, generator: Generator, tick: Callable[[], None]
) -> Slopes:
    h = settings.curvature
    training = Training(plain(lambda params, center: 0.5 * (h * (params["x"] - center) ** 2).sum()), SGD())
    params = {"x": torch.full_like(h, situation.distance)}
    meta = training.init_meta(params, lr=situation.lr)

    def above_floor(carry: Carry) -> Tensor:
        return 0.5 * (h * carry.params["x"] ** 2).sum()

    def hypergradient(carry: Carry, centers: Tensor) -> Tensor:
        return adjoint(training, above_floor, meta, carry, list(centers)).grads.hyper.lr

    def noise(steps: int) -> Tensor:
        return torch.randn(settings.samples, steps, len(h), dtype=h.dtype, generator=generator)

    carry = vmap(lambda x: training.init({"x": x}))(params["x"].expand(settings.samples, -1))
    for centers in noise(situation.before).unbind(1):
        carry, _ = vmap(lambda carry, center: training.step(meta, carry, center))(carry, centers)
    sampled = []
    for steps in settings.horizons:
        sampled.append(vmap(hypergradient)(carry, noise(steps)))
        tick()

    lr = meta.hyper.lr
    start = spread(lr, h, params["x"] ** 2, situation.before)
    every = torch.arange(1, max(settings.horizons) + 1)
    slope = grad(lambda lr, steps: 0.5 * (h * spread(lr, h, start, steps)).sum())
    return Slopes(torch.stack(sampled), vmap(slope, in_dims=(None, 0))(lr, every))


def race(settings: Quadratic) -> tuple[Trajectory, Trajectory]:
    """Return expected losses and learning rates by step: the best for the next step, and the best fixed one.

    The best for the next step is Σ h² s / Σ h³ (s + 1), s = E θ²: what a perfect greedy rule would take.
    """
    h, far = settings.curvature, SITUATIONS["middle"].distance
    start, steps = torch.full_like(h, far**2), torch.arange(settings.race + 1)
    losses, lrs, s = [], [], start
    for _ in steps:
        losses.append(0.5 * (h * s).sum())
        lrs.append((h**2 * s).sum() / (h**3 * (s + 1)).sum())
        s = spread(lrs[-1], h, s, 1)

    def fixed(lr: Tensor) -> Tensor:
        return vmap(lambda t: 0.5 * (h * spread(lr, h, start, t)).sum())(steps)

    grid = torch.logspace(-3, 0, 200, dtype=h.dtype)
    best = grid[vmap(fixed)(grid)[:, -1].argmin()]
    return Trajectory(torch.stack(losses), torch.stack(lrs)), Trajectory(fixed(best), best.expand(len(steps)))


def report(settings: Quadratic, found: dict[str, Slopes], out: Path) -> Summary:
    """Print dJ/dlr by horizon, and how two rules for the learning rate end; return the figures."""
    figures: Summary = {}
    rows = []
    for name, one in found.items():
        for steps, mean, error in zip(settings.horizons, one.means, one.errors, strict=True):
            exact = one.expected[steps - 1]
            advice = "raise it" if exact < 0 else "lower it"
            rows.append([name, str(steps), f"{mean:+.2f} ± {error:.2f}", f"{exact:+.2f}", advice])
            figures[f"quadratic_{name}_dlr_t{steps}"] = round(mean.item(), 4)
            figures[f"quadratic_{name}_dlr_t{steps}_expected"] = round(exact.item(), 4)
        figures[f"quadratic_{name}_flip_horizon"] = one.flip
    title = f"Noisy quadratic: mean dJ/dlr of {settings.samples} runs ± standard error, and its expectation"
    show_table(out, title, ["where", "T", "by adjoint", "expected", "the lr?"], rows)
    greedy, fixed = race(settings)
    figures["quadratic_race_greedy"] = round(greedy.losses[-1].item(), 4)
    figures["quadratic_race_fixed"] = round(fixed.losses[-1].item(), 4)
    return figures


def conclusions(settings: Quadratic, found: dict[str, Slopes]) -> list[str]:
    sentences = []
    for name, one in found.items():
        greedy, later = ("raise", "lower") if one.expected[0] < 0 else ("lower", "raise")
        flip = f"T = {one.flip} is the first to say {later}" if one.flip else "so do all longer horizons"
        sentences.append(f"Noisy quadratic, {name}: T = 1 says {greedy} the learning rate; {flip}.")
    greedy, fixed = race(settings)
    worse = greedy.losses[-1] / fixed.losses[-1]
    sentences.append(
        f"The best learning rate for each next step leads to {worse:.1f} times the loss of the best fixed "
        f"one, {settings.race} steps on."
    )
    return sentences


def log(settings: Quadratic, found: dict[str, Slopes], logger: Logger) -> None:
    """Write mean dJ/dlr by T."""
    for name, one in found.items():
        for steps, mean in zip(settings.horizons, one.means, strict=True):
            logger.info(steps, {f"noisy quadratic, dJ by dlr/{name}": mean})


def draw(settings: Quadratic, found: dict[str, Slopes], out: Path) -> None:
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    panels = figure.subplots(1, len(found) + 1)
    for axes, (name, one) in zip(panels, found.items(), strict=False):
        draw_slopes(axes, settings, SITUATIONS[name], one)
    panels[0].legend(fontsize="small", loc="lower right")
    axes, (greedy, fixed) = panels[-1], race(settings)
    steps = range(1, settings.race + 1)
    axes.loglog(
        steps, greedy.losses[1:], color=ORANGE, linewidth=2, label="greedy: best lr for the next step"
    )
    best = f"best fixed lr for {settings.race} steps, {fixed.lrs[0]:.2f}"
    axes.loglog(steps, fixed.losses[1:], color=BLUE, linewidth=2, label=best)
    axes.set_title("What greed costs, from far away")
    axes.set_xlabel("steps")
    axes.set_ylabel("expected loss above its floor")
    axes.legend()
    figure.savefig(out / "quadratic.png", dpi=110)


def draw_slopes(axes: Axes, settings: Quadratic, situation: Situation, one: Slopes) -> None:
    every, slopes = range(1, len(one.expected) + 1), one.expected
    axes.fill_between(every, slopes, where=slopes.numpy() <= 0, interpolate=True, color=BLUE, alpha=0.2)
    axes.fill_between(every, slopes, where=slopes.numpy() >= 0, interpolate=True, color=ORANGE, alpha=0.3)
    axes.plot(every, slopes, color="black", linewidth=1, label="expected, closed form")
    axes.errorbar(
        settings.horizons,
        one.means,
        yerr=2 * one.errors,
        color=GREEN,
        marker="o",
        linestyle="",
        capsize=4,
        label="adjoint, mean ± 2 errors",
    )
    axes.axhline(0, color="black", linewidth=0.8)
    if one.flip:
        axes.axvline(one.flip, 0.1, 0.9, color="grey", linestyle=":")
        beside = (4, 5 if slopes[0] > 0 else -14)  # points from where the curve crosses zero
        axes.annotate(f"flips at T = {one.flip}", (one.flip, 0), beside, textcoords="offset points")
    for height, text, colour in ((0.97, "↑ lower the lr", "#A65F00"), (0.03, "↓ raise the lr", BLUE)):
        side = "top" if height > 0.5 else "bottom"
        axes.text(0.02, height, text, transform=axes.transAxes, va=side, color=colour, fontweight="bold")
    axes.set_xscale("log")
    axes.set_xticks(settings.horizons, [str(steps) for steps in settings.horizons], minor=False)
    axes.set_xticks([], minor=True)
    axes.margins(y=0.2)
    axes.set_title(situation.label)
    axes.set_xlabel("T, steps until the loss that counts")
    axes.set_ylabel("dJ/dlr, the loss after T steps by the learning rate")
