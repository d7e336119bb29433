"""What does training gain from hyperparameters that are tuned, learned online, or learned by unrolling?"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Generator, Tensor
from torch.func import vmap

from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.runner.progress import progress
from experiments.studies.compare.digits import Digits
from experiments.studies.compare.methods import (
    Method,
    Networks,
    falling,
    fixed,
    learn_schedule,
    online,
    scheduled,
)
from metafop.tensorboard import Logger

AVERAGED = 10  # batches for a point of the training curve


@dataclass(frozen=True)
class Curves:
    """Momentum 0.9 with a learning rate that is fixed, or falls, or is learned online or by unrolling.

    What is chosen or learned beforehand is so on some networks, by their validation loss after `horizon`
    steps; then all methods train fresh networks, on the same batches.
    """

    lr: float = 0.01  # where every method but the tuned ones starts: too small
    lrs: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)  # to choose the tuned ones from
    meta_lrs: tuple[float, ...] = (0.01, 0.03, 0.1)  # of Adam online, to choose from
    meta_lr: float = 0.1  # of Adam by unrolling
    meta_steps: int = 40  # each through the horizon
    horizon: int = 100  # steps that are unrolled
    together: int = 4  # networks that a meta step is averaged over
    tuning: int = 8  # networks to choose and learn on
    fresh: int = 16  # networks to report on
    steps: int = 300  # of training
    batch: int = 64  # images in a batch

    def __post_init__(self) -> None:
        if self.steps < AVERAGED:
            raise ValueError(f"curves.steps must be {AVERAGED} or more, got {self.steps}. Pass more.")
        if self.together > self.tuning:
            raise ValueError(
                f"curves.together must be at most curves.tuning, got {self.together} and {self.tuning}. "
                "Pass fewer, or more for tuning."
            )

    @property
    def networks(self) -> int:
        return self.tuning + self.fresh


class Prepared(NamedTuple):
    """A method for fresh networks; what was chosen or learned for it before, and what that took."""

    method: Method
    chosen: str
    gradients: int = 0  # a Hessian times a vector counts as one


class Curve(NamedTuple):
    """The loss on the batch, the test loss after the step and its learning rate: (steps, networks)."""

    training: Tensor
    test: Tensor
    lrs: Tensor


STYLES = {  # by name in the summary: the label, and a colour of Okabe and Ito's, for the colour-blind
    "fixed": ("fixed lr, untuned", "#999999"),
    "tuned": ("fixed lr, tuned", "black"),
    "falling": ("falling lr, tuned", "#009E73"),
    "online": ("online: lr", "#E69F00"),
    "online_all": ("online: lr, momentum, M", "#CC79A7"),
    "unrolled": ("unrolled: lr schedule", "#0072B2"),
}
ONLINE = {"online": ("lr",), "online_all": ("lr", "momentum", "precond")}


def steps(method: Method, order: Tensor) -> Iterator[tuple[int, Any, Tensor, Any]]:
    """Train on (networks, steps, batch): give each step's number, state before, loss, and state after."""
    state, step = method.state, vmap(lambda meta, state, batch: method.learner.step(meta, state, batch))
    for t in range(order.shape[1]):
        after, info = step(method.meta, state, order[:, t])
        yield t, state, info["value"], after
        state = after


def best(
    values: Sequence[float],
    begin: Callable[[Tensor, Tensor], Method],
    digits: Digits,
    order: Tensor,
    tick: Callable[[], None],
) -> float:
    """Return the value with which networks have the least validation loss after training on `order`."""
    networks = torch.arange(len(order)).repeat(len(values))
    method = begin(networks, torch.tensor(values, dtype=torch.float64).repeat_interleave(len(order)))
    state = method.state
    for *_, after in steps(method, order[networks]):
        state = after
        tick()
    losses = vmap(digits.validation)(state)
    return values[int(losses.view(len(values), -1).mean(1).nan_to_num(torch.inf).argmin())]


def prepare(
    settings: Curves, digits: Digits, seed: int, generator: Generator, out: Path
) -> dict[str, Prepared]:
    """Choose and learn what is chosen and learned beforehand."""
    order = digits.draw((settings.tuning, settings.horizon, settings.batch), generator)
    fresh = torch.arange(settings.tuning, settings.tuning + settings.fresh)

    def each(value: float) -> Tensor:
        return torch.full((settings.fresh,), value, dtype=torch.float64)

    tuned: dict[str, tuple[str, Sequence[float], Callable[[Tensor, Tensor], Method]]] = {
        "tuned": ("lr", settings.lrs, partial(fixed, digits)),
        "falling": ("lr", settings.lrs, partial(falling, digits, horizon=settings.horizon)),
    }
    for name, learn in ONLINE.items():
        tuned[name] = ("meta lr", settings.meta_lrs, partial(online, digits, lr=settings.lr, learn=learn))
    methods = {"fixed": Prepared(fixed(digits, fresh, each(settings.lr)), f"lr {settings.lr:g}")}
    with progress(len(tuned) * settings.horizon) as tick:
        for name, (what, values, begin) in tuned.items():
            value = best(values, begin, digits, order, lambda name=name: tick(f"choosing: {STYLES[name][0]}"))
            spent = settings.tuning * settings.horizon * len(values)
            methods[name] = Prepared(begin(fresh, each(value)), f"{what} {value:g}", spent)

    task = Networks(digits, settings.tuning, settings.together, settings.horizon, settings.batch, seed)
    learned = learn_schedule(task, settings.lr, settings.meta_lr, settings.meta_steps, out / "unrolled")
    method = scheduled(digits, fresh, learned.expand(settings.fresh, -1))
    # Ahead a gradient a step; going back, the same again and a Hessian times a vector.
    spent = 3 * settings.meta_steps * settings.together * settings.horizon
    methods["unrolled"] = Prepared(method, f"lr {learned.min():.2g}..{learned.max():.2g}", spent)
    return methods


def measure(
    settings: Curves,
    digits: Digits,
    methods: dict[str, Prepared],
    generator: Generator,
    tick: Callable[[str], None],
) -> dict[str, Curve]:
    """Train fresh networks with every method, on the same batches."""
    order = digits.draw((settings.fresh, settings.steps, settings.batch), generator)
    curves = {}
    for name, (method, *_) in methods.items():
        found = []
        for t, state, value, after in steps(method, order):
            lrs = method.lr(method.meta, state, t)
            found.append(torch.stack([value, vmap(digits.test)(after), lrs]))
            tick(STYLES[name][0])
        curves[name] = Curve(*torch.stack(found, dim=1))
    return curves


def report(settings: Curves, methods: dict[str, Prepared], curves: dict[str, Curve], out: Path) -> Summary:
    """Print the losses that each method leads to, and what it took beforehand; return the figures."""
    figures: Summary = {}
    ends = {"horizon": min(settings.horizon, settings.steps), "final": settings.steps}
    rows = []
    for name, method in methods.items():
        cells = []
        for end, t in ends.items():
            losses = curves[name].test[t - 1]
            mean, error = losses.mean().item(), losses.std(correction=0).item() / len(losses) ** 0.5
            cells.append(f"{mean:.3f}±{error:.3f}")
            figures[f"{end}_loss_{name}"] = round(mean, 4) if math.isfinite(mean) else None
        figures[f"gradients_before_{name}"] = method.gradients
        rows.append([STYLES[name][0], *cells, method.chosen, f"{method.gradients:,}"])
    columns = ["", *(f"{t} steps" for t in ends.values()), "chosen", "gradients"]
    title = f"Test loss of {settings.fresh} fresh networks ± standard error; gradients spent beforehand"
    show_table(out, title, columns, rows)
    return figures


def conclusions(settings: Curves, methods: dict[str, Prepared], curves: dict[str, Curve]) -> list[str]:
    sentences = []
    for steps in sorted({min(settings.horizon, settings.steps), settings.steps}):
        losses = {name: curve.test[steps - 1].mean().item() for name, curve in curves.items()}
        ranked = [f"{STYLES[name][0]} {losses[name]:.3f}" for name in sorted(losses, key=losses.__getitem__)]
        sentences.append(f"Test loss of fresh networks after {steps} steps: {'; '.join(ranked)}.")
    spent = [f"{method.gradients:,} ({STYLES[name][0]})" for name, method in methods.items()]
    sentences.append(f"Gradients taken beforehand, to choose or learn: {', '.join(spent)}.")
    return sentences


def log(curves: dict[str, Curve], logger: Logger) -> None:
    for name, curve in curves.items():
        for t in range(len(curve.test)):
            logger.info(t, {f"{key}/{STYLES[name][0]}": x[t].mean() for key, x in curve._asdict().items()})


def draw(settings: Curves, curves: dict[str, Curve], out: Path) -> None:
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    figure.suptitle(
        f"Training {settings.fresh} fresh networks: the median, and the middle half of them shaded"
    )
    panels = figure.subplots(1, 3)
    for name, curve in curves.items():
        whole = curve.training[: len(curve.training) // AVERAGED * AVERAGED]
        averaged = whole.view(-1, AVERAGED, whole.shape[1]).mean(1)
        band(panels[0], averaged, *STYLES[name], every=AVERAGED)
        band(panels[1], curve.test, *STYLES[name])
        band(panels[2], curve.lrs, *STYLES[name])
    titles = (f"Training loss, mean of {AVERAGED} batches", "Test loss", "Learning rate")
    for axes, title in zip(panels, titles, strict=True):
        axes.axvline(settings.horizon, color="grey", linestyle=":")
        at = (settings.horizon, 0.01)
        axes.annotate(" horizon", at, xycoords=("data", "axes fraction"), color="grey", fontsize="small")
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("steps")
    panels[0].legend()
    figure.savefig(out / "curves.png", dpi=110)


def band(axes: Axes, values: Tensor, label: str, colour: str, every: int = 1) -> None:
    """Draw the median of the networks and, shaded, the middle half of them."""
    at = torch.arange(len(values)) * every + every // 2
    low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype), dim=1)
    axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(at, middle, color=colour, label=label)
