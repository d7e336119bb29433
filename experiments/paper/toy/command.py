"""Figure 1 of the paper, and how often each order and safeguard fails from random starts."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import vmap

from experiments.paper.toy.methods import METHODS, Method
from experiments.paper.toy.surfaces import SURFACES, Surface
from experiments.reporting.summary import Summary, write_summary
from experiments.reporting.tables import show_table
from experiments.runner import experiment
from experiments.runner.progress import progress
from experiments.runner.settings import AnySign, FromZero
from metafop import tree
from metafop.tensorboard import Logger


@dataclass(frozen=True)
class Descent:
    start: tuple[AnySign[float], AnySign[float]]  # where the runs of the figure start
    lr: float  # learning rate of every method
    box: float  # random starts are uniform in [-box, box]²


@dataclass(frozen=True)
class Config:
    """Figure 1: FOP on the Booth and Himmelblau functions, and how often it fails from random starts.

    A run fails if its loss does not fall below the tolerance within the steps it is given.
    """

    out: Path = Path("runs/toy")  # folder for pictures, numbers and TensorBoard events
    booth: Descent = Descent(start=(8.0, 4.0), lr=0.005, box=10.0)
    himmelblau: Descent = Descent(start=(0.0, -1.0), lr=0.001, box=5.0)
    meta_lr: float = 0.01  # ρ, the learning rate of M, of every FOP in the figure
    meta_lrs: tuple[float, ...] = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # ρ to try from random starts
    tolerance: float = 1e-6  # the loss at which a run is done
    steps: int = 10_000  # steps at most in the figure
    starts: int = 100  # random starts for each function
    sweep_steps: int = 1500  # steps at most from a random start
    seed: FromZero[int] = 0  # seed of the random starts
    threads: int = 1  # threads that torch may use

    @property
    def grid(self) -> list[float]:
        return sorted({*self.meta_lrs, self.meta_lr})


FIGURE = {  # by name in summary.json: the method, its colour (Okabe and Ito's, for the colour-blind) and line
    "gd": ("gd", "#0072B2", "-"),
    "fop": ("exact", "#D55E00", "-"),
    "fop_paper": ("paper", "black", ":"),
    "fop_safe": ("safe", "#009E73", "-"),
    "adam": ("adam", "#CC79A7", "-"),
}
SWEPT = [name for name in METHODS if name not in ("gd", "adam")]


class Trace(NamedTuple):
    """A run of the figure: how many steps it took (None: too many), and its path, (steps + 1, 2)."""

    steps: int | None
    path: Tensor


Traces = dict[str, dict[str, Trace]]  # by function, and by name in the figure
Rates = dict[str, tuple[Tensor, Tensor]]  # by function: runs that fail, median steps over GD's; (methods, ρ)


def trace(method: Method, surface: Surface, descent: Descent, config: Config, logger: Logger) -> Trace:
    start = torch.tensor(descent.start, dtype=torch.float64)
    meta, state = method.begin(surface, descent.lr, config.meta_lr, start)
    learner, path = method.learner(surface), []
    for step in range(config.steps + 1):
        path.append(state.params["x"])
        state, info = learner.step(meta, state, None)
        reached = bool(info["value"] < config.tolerance)  # before this step, so after `step` of them
        if step % 10 == 0 or reached:
            logger.info(step, info)
            if method.online:
                logger.diagnostics(step, learner.training, state.meta, state.last_seen.grads)
        if reached:
            return Trace(step, torch.stack(path))
    return Trace(None, torch.stack(path))


def sweep(method: Method, surface: Surface, lr: float, points: Tensor, config: Config) -> Tensor:
    """Return how many steps each run takes, (ρ, points), ∞ if it fails: one vmapped program for all."""
    meta_lrs = torch.tensor(config.grid, dtype=torch.float64)
    rho, x = meta_lrs.repeat_interleave(len(points)), points.repeat(len(meta_lrs), 1)
    meta, state = vmap(lambda rho, x: method.begin(surface, lr, rho, x))(rho, x)
    step = vmap(partial(method.learner(surface).step, batch=None))
    counts, runs = torch.full_like(rho, torch.inf), torch.arange(len(rho))
    for taken in range(config.sweep_steps + 1):
        state, info = step(meta, state)
        reached = info["value"] < config.tolerance
        # A gradient that is not finite counts as zero: but for a null step, nothing ever moves again.
        lost = ~info.get("finite", info["value"].isfinite()) & ~info.get("rose", torch.tensor(False))
        on = ~(reached | lost)
        if not on.all():
            counts = counts.index_put((runs[reached],), counts.new_tensor(taken))
            runs, meta, state = tree.map(lambda x, on=on: x[on], (runs, meta, state))
        if len(runs) == 0:
            break
    return counts.view(len(meta_lrs), len(points))


def main(config: Config) -> None:
    generator = experiment.begin(config)
    traces, rates = {name: {} for name in SURFACES}, {}
    with progress(len(SURFACES) * (len(FIGURE) + 1 + len(SWEPT))) as doing:
        for name, surface in SURFACES.items():
            descent, counts = getattr(config, name), {}
            for key, (method, *_) in FIGURE.items():
                doing(f"{name.title()}: {METHODS[method].label}")
                with Logger(config.out / "events" / name / key) as logger:
                    traces[name][key] = trace(METHODS[method], surface, descent, config, logger)
            uniform = torch.rand(config.starts, 2, generator=generator, dtype=torch.float64)
            points = descent.box * (2 * uniform - 1)
            for method in ("gd", *SWEPT):
                doing(f"{name.title()} from random starts: {METHODS[method].label}")
                counts[method] = sweep(METHODS[method], surface, descent.lr, points, config)
            swept, baseline = torch.stack([counts[method] for method in SWEPT]), counts["gd"].median()
            # A run that fails takes infinitely many steps, so that failures count against the median.
            ratio = swept.median(-1).values / baseline.where(baseline < torch.inf, torch.nan)
            rates[name] = (swept.isinf().double().mean(-1), ratio)
    plot_traces(config, traces).savefig(config.out / "trajectories.png")
    plot_rates(config, rates).savefig(config.out / "failures.png")
    write_summary(config.out, report(config, traces, rates))


def report(config: Config, traces: Traces, rates: Rates) -> Summary:
    """Print the tables, and return the headline figures: rates at ρ = `meta_lr`, and the worst at any ρ."""
    figures: Summary = {}
    here = config.grid.index(config.meta_lr)
    for name, surface in SURFACES.items():
        rows = []
        for key, found in traces[name].items():
            figures[f"{name}_{key}"] = found.steps
            rows.append((METHODS[FIGURE[key][0]].label, _steps(found), str(surface.paper.get(key, ""))))
        title = f"{name.title()}: steps to a loss below {config.tolerance:g}, ρ = {config.meta_lr:g}"
        show_table(config.out, title, ["", "steps", "in the paper"], rows)
        rows = []
        for method, failures, ratio in zip(SWEPT, *rates[name], strict=True):
            at, worst, steps = failures[here].item(), failures.max().item(), ratio[here].item()
            figures[f"{name}_failures_{method}"] = at
            figures[f"{name}_failures_{method}_worst"] = worst
            figures[f"{name}_ratio_{method}"] = steps if steps < torch.inf else None
            rows.append((METHODS[method].label, _percent(at), _percent(worst), _ratio(steps)))
        columns = ["", f"fail, ρ = {config.meta_lr:g}", "fail, worst ρ", "steps / GD"]
        show_table(config.out, f"{name.title()}: {config.starts} random starts", columns, rows)
    return figures


def plot_traces(config: Config, traces: Traces) -> Figure:
    """Draw the paths over each function, and below it the loss step by step."""
    figure = Figure(figsize=(15, 11), layout="constrained")
    title = f"Five ways from the red dot to a loss below {config.tolerance:g}, with ρ = {config.meta_lr:g}"
    figure.suptitle(title, fontsize=16)
    for axes, curves, name in zip(*figure.subplots(2, 2, height_ratios=(3, 2)), SURFACES, strict=True):
        plot_surface(axes, SURFACES[name], getattr(config, name))
        axes.set_title(f"{name.title()} function, learning rate {getattr(config, name).lr:g}")
        for key, found in traces[name].items():
            method, colour, line = FIGURE[key]
            axes.plot(found.path[:, 0], found.path[:, 1], line, color=colour, linewidth=2, zorder=1)
            loss = SURFACES[name].loss({"x": found.path.T}, None)[1:]
            label = f"{METHODS[method].label}: {_steps(found)} steps"
            curves.loglog(range(1, len(loss) + 1), loss, line, color=colour, linewidth=2, label=label)
        curves.axhline(config.tolerance, color="grey", linewidth=1)
        curves.set(xlabel="steps", ylabel="loss", ylim=(config.tolerance / 10, None))
        curves.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return figure


def plot_surface(axes: Axes, surface: Surface, descent: Descent) -> None:
    left, right, bottom, top = surface.view
    left, right = min(left, descent.start[0] - 1), max(right, descent.start[0] + 1)
    bottom, top = min(bottom, descent.start[1] - 1), max(top, descent.start[1] + 1)
    x, y = torch.linspace(left, right, 300), torch.linspace(bottom, top, 300)
    loss = surface.loss({"x": torch.stack(torch.meshgrid(x, y, indexing="xy"))}, None)
    levels = torch.logspace(-1, 3, 17)
    shades = axes.contourf(x, y, loss, levels, norm=LogNorm(), cmap="Greys", extend="both", alpha=0.4)
    axes.figure.colorbar(shades, ax=axes, label="loss", ticks=[0.1, 1, 10, 100, 1000])
    axes.plot(*descent.start, "o", color="red", mec="black", ms=11, label="start")
    axes.plot(*zip(*surface.minima, strict=True), "*", color="white", mec="black", ms=16, label="minimum")
    axes.set(xlabel="x", ylabel="y", xlim=(left, right), ylim=(bottom, top))
    axes.legend(loc="upper left")


def plot_rates(config: Config, rates: Rates) -> Figure:
    """Draw two tables for each function, with a row for each method and a column for each ρ."""
    figure = Figure(figsize=(14, 9.5), layout="constrained")
    fails = f"A run fails if its loss is not below {config.tolerance:g} within {config.sweep_steps} steps."
    figure.suptitle(f"FOP from {config.starts} random starts. {fails}", fontsize=16)
    oranges = colormaps["Oranges"].with_extremes(under="white")
    blues = colormaps["RdBu_r"].with_extremes(over="lightgrey", bad="lightgrey")
    for share, speed, name in zip(*figure.subplots(2, 2, sharey=True), SURFACES, strict=True):
        failures, ratio = (values.numpy() for values in rates[name])
        share.imshow(failures, cmap=oranges, vmin=1e-9, vmax=1.5, aspect="auto")
        share.set_title(f"{name.title()}: runs that fail")
        speed.imshow(ratio.clip(max=1e9), cmap=blues, norm=LogNorm(0.02, 50), aspect="auto")
        speed.set_title(f"{name.title()}: median steps, gradient descent = 1 (blue: fewer)")
        for axes, values, text in ((share, failures, _percent), (speed, ratio, _ratio)):
            axes.set_xlabel("meta learning rate ρ")
            axes.set_xticks(range(len(config.grid)), [f"{rho:g}" for rho in config.grid])
            axes.set_yticks(range(len(SWEPT)), [METHODS[method].label for method in SWEPT])
            for (y, x), value in np.ndenumerate(values):
                axes.text(x, y, text(value), ha="center", va="center")
    return figure


def _steps(found: Trace) -> str:
    return "too many" if found.steps is None else str(found.steps)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < torch.inf else "most fail"
