"""The figure: Theorem 1 on two quadratics, the norm of P, and γ by rule."""

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.paper.theory import counterexamples
from experiments.paper.theory.counterexamples import BLUE, ORANGE, Curves
from experiments.paper.theory.theorem1 import Descents
from metafop.tensorboard import Logger


def draw(out: Path, found: Descents) -> Figure:
    """Draw Theorem 1 on two quadratics, the norm of P, and γ; and write the curves to TensorBoard."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    above, below = figure.subplots(2, 2)
    printed = found.claims["printed"]
    step = min(20, len(found.values["printed"]) - 1)
    excess = (found.values["printed"][step] / found.values["printed"][0]).log() - step * printed.rate.log()
    order = excess.where(found.usable, -torch.inf).argsort(descending=True)
    events, middle = out / "events", int(found.usable.sum()) // 2
    draw_descent(above[0], found, int(order[0]), events / "theorem1_failure")
    draw_descent(above[1], found, int(order[middle]), events / "theorem1_typical")
    above[0].set_title("Theorem 1: the printed claim's worst failure")
    above[1].set_title("Theorem 1: a typical quadratic with ρ > 0")
    draw_norm(below[0], events / "theorem2_norm")
    draw_gamma(below[1], events / "theorem2_gamma")
    return figure


def draw_descent(axes: Axes, found: Descents, i: int, out: Path) -> None:
    curves = {}
    for name, colour in (("printed", ORANGE), ("corrected", BLUE)):
        claim, values = found.claims[name], found.values[name][:, i]
        curves[f"run, {name} step {claim.step[i]:.3g}"] = (values / values[0], colour, "-")
        claimed = claim.rate[i] ** torch.arange(len(values))
        curves[f"{name} claim, {claim.rate[i]:.3g} a step"] = (claimed, colour, "--")
    plot(axes, curves, out, first=0)
    axes.set(xlabel="steps", ylabel="(f − f*) / (f − f*) at the start", yscale="log")
    axes.set(xlim=(0, 40), ylim=(1e-7, 2))
    axes.legend(loc="best", fontsize="small")


def draw_norm(axes: Axes, out: Path) -> None:
    plot(axes, counterexamples.norm_curves(), out)
    axes.set(xlabel="steps t", ylabel="‖P‖", yscale="log")
    axes.set_title("Theorem 2: ‖P‖ on log cosh, from 10⁵ with ρ = 0.02")
    axes.legend(loc="upper left", fontsize="small")


def draw_gamma(axes: Axes, out: Path) -> None:
    plot(axes, counterexamples.gamma_curves(), out)
    for height, words, at in ((1.0, "1/L", 150), (0.1, "p∞", 1.1)):
        axes.axhline(height, color="grey", linewidth=1, linestyle=":")
        axes.annotate(words, (at, height), (0, 3), textcoords="offset points", color="dimgrey")
    axes.set(xlabel="steps t", ylabel="γ(t), the norm of P in the step", xscale="log", yscale="log")
    axes.set(xlim=(1, 200), ylim=(0.05, 1000))
    axes.set_title("Theorem 2: γ(t) there, by what M is learned on from")
    axes.legend(loc="center", fontsize="small")


def plot(axes: Axes, curves: Curves, out: Path, first: int = 1) -> None:
    """Plot curves by name, with colour and line, from step `first` on; and write them to TensorBoard."""
    for name, (values, colour, line) in curves.items():
        axes.plot(range(first, first + len(values)), values, line, color=colour, linewidth=2, label=name)
    with Logger(out) as logger:
        for step, here in enumerate(zip(*(values for values, _, _ in curves.values()), strict=True), first):
            logger.info(step, dict(zip(curves, here, strict=True)))
