"""Does the derivative of one step point where the derivative of many steps points?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Generator, Tensor
from torch.func import grad, vmap

from experiments import run
from experiments.digits import Digits
from metafop import Carry, Last, LowRank, Meta, Momentum, Training, tree
from metafop.hypergradients import adjoint, closed_form
from metafop.tensorboard import Logger


@dataclass(frozen=True)
class Horizons:
    """Hypergradients at several points of training with momentum 0.9, by learning rate.

    All are derivatives of one outer loss, that of all validation digits, from one point on the same batches.
    "T steps" is exact, of the loss after T steps. "One step" is the online rule: of the loss after the first
    of them, P credited for the last gradient. "Velocity" credits P for the whole velocity, as `Online` does
    unless told otherwise; "summed" is its sum over the T steps, where learning online would go meanwhile.
    """

    lrs: tuple[float, ...] = (0.003, 0.05, 0.3)  # too small, about right, too large
    points: tuple[int, ...] = (0, 20, 100, 400)  # steps of training before
    steps: tuple[int, ...] = (1, 5, 20, 100)  # T
    networks: int = 16  # each trained on its own batches
    batch: int = 64  # images in a batch
    sigma: float = 0.1  # size of M in P = I + M Mᵀ: away from M = 0, where its derivative is zero

    def __post_init__(self) -> None:
        if 1 not in self.steps or min(self.steps) < 1 or min(self.points) < 0 or self.networks < 1:
            raise ValueError("horizons.steps must have 1 among them, for the check, and no point be below 0.")

    @property
    def ticks(self) -> int:
        return max(self.points) + max(self.steps) + len(self.points) * len(self.steps)


PARTS = {"lr": "learning rate", "decay": "momentum", "M": "preconditioners"}
RULES = ("one step", "velocity", "summed")
TRUSTED = 0.5  # a mean cosine of so much: for a number, three networks in four agree in sign
By = dict[str, Tensor]  # a hypergradient by part: (lanes, numbers), a lane for each learning rate and network


class Agreement(NamedTuple):
    """One-step hypergradients against T-step ones: (parts, rules, lrs, points, steps, networks).

    The cosine of two numbers is 1 or -1: whether they have the same sign. It is 0 where one is zero. `ratios`
    are of norms, one step over T steps; `slopes` the T-step derivatives in lr, without parts and rules;
    `error` the largest relative difference at T = 1.
    """

    cosines: Tensor
    ratios: Tensor
    slopes: Tensor
    error: float

    def mean(self, part: str, rule: str) -> Tensor:
        """Return the mean cosine over networks: (lrs, points, steps)."""
        return self.cosines[list(PARTS).index(part), RULES.index(rule)].mean(-1)


class Walk(NamedTuple):
    """A training of all lanes: the carry at each point, and the one-step hypergradients of every window."""

    carries: dict[int, Carry]
    last: dict[int, By]  # P credited for the last gradient
    credited: dict[int, By]  # P credited for the velocity


def trainer(settings: Horizons, digits: Digits) -> tuple[Training, Meta]:
    """Return momentum under P = I + M Mᵀ for each layer, and a meta for each lane."""
    families = {k: LowRank(sigma=settings.sigma) for k, p in digits.networks.items() if p.dim() == 3}
    training = Training(digits.loss, Momentum(), families)
    metas = []
    for lr in settings.lrs:
        for i in range(settings.networks):
            params, generator = digits.take(torch.tensor(i)), Generator().manual_seed(i)
            metas.append(training.meta(params, Momentum().hyper(lr=lr), generator))
    return training, tree.stack(metas)


def measure(
    settings: Horizons, digits: Digits, generator: Generator, tick: Callable[[str], None]
) -> Agreement:
    """Train all lanes in one vmapped program, then unroll T steps from every point."""
    training, metas = trainer(settings, digits)
    length = max(settings.points) + max(settings.steps)
    order = digits.draw((settings.networks, length, settings.batch), generator)
    order = order.repeat(len(settings.lrs), 1, 1)  # every learning rate sees the same batches
    walked = walk(settings, training, digits, metas, order, lambda: tick("one step at a time"))

    def many_steps(meta: Meta, carry: Carry, order: Tensor) -> Meta:
        return adjoint(training, digits.validation, meta, carry, list(order)).grads

    cosines, ratios, slopes, errors = [], [], [], [0.0]
    for point in settings.points:
        for steps in settings.steps:
            window = range(point, point + steps)
            exact = by_part(vmap(many_steps)(metas, walked.carries[point], order[:, window]))
            total = summed([walked.credited[t] for t in window])
            rules = [walked.last[point], walked.credited[point], total]
            cosines.append(paired(cosine, rules, exact))
            ratios.append(paired(ratio, rules, exact))
            slopes.append(exact["lr"])
            if steps == 1:
                errors.append(paired(relative_error, rules[:1], exact).max().item())
            tick(f"through {steps} steps after {point}")

    shape = (len(settings.points), len(settings.steps), len(PARTS), len(RULES), len(settings.lrs), -1)
    by_rule = [torch.stack(found).view(shape).permute(2, 3, 4, 0, 1, 5) for found in (cosines, ratios)]
    by_lr = torch.stack(slopes).view(*shape[:2], len(settings.lrs), -1).permute(2, 0, 1, 3)
    return Agreement(by_rule[0], by_rule[1], by_lr, max(errors))


def walk(
    settings: Horizons,
    training: Training,
    digits: Digits,
    metas: Meta,
    order: Tensor,
    tick: Callable[[], None],
) -> Walk:
    def ahead(meta: Meta, carry: Carry, memory: Any, batch: Tensor) -> tuple[Last, Carry, Any]:
        seen = training.evaluate(carry, batch)
        credit, memory = training.credited(meta, memory, seen.grads)
        return Last(carry, seen, credit), training.advance(meta, carry, seen)[0], memory

    def one_step(meta: Meta, last: Last, after: Carry) -> tuple[Meta, Meta]:
        outer = grad(lambda params: digits.validation(Carry(params, after.opt, after.buffers)))(after.params)
        uncredited = Last(last.carry, last.seen, ())
        return closed_form(training, meta, uncredited, outer), closed_form(training, meta, last, outer)

    windows = {t for point in settings.points for t in range(point, point + max(settings.steps))}
    lanes = torch.arange(settings.networks).repeat(len(settings.lrs))
    walked, carry = Walk({}, {}, {}), vmap(training.init)(digits.take(lanes))
    memory = vmap(training.init_memory)(carry)
    for t in range(max(windows) + 1):
        if t in settings.points:
            walked.carries[t] = carry
        step, carry, memory = vmap(ahead)(metas, carry, memory, order[:, t])
        if t in windows:
            last, credited = vmap(one_step)(metas, step, carry)
            walked.last[t], walked.credited[t] = by_part(last), by_part(credited)
        tick()
    return walked


def by_part(grads: Meta) -> By:
    preconditioners = torch.cat([m.flatten(1) for m in tree.leaves(grads.precond)], dim=1)
    return {"lr": grads.hyper.lr[:, None], "decay": grads.hyper.decay[:, None], "M": preconditioners}


def summed(steps: Sequence[By]) -> By:
    return {k: torch.stack([step[k] for step in steps]).sum(0) for k in PARTS}


def paired(measure: Callable[[Tensor, Tensor], Tensor], rules: Sequence[By], exact: By) -> Tensor:
    """Return what is measured of each part and rule: (parts, rules, lanes)."""
    return torch.stack([torch.stack([measure(rule[k], exact[k]) for rule in rules]) for k in PARTS])


def cosine(x: Tensor, y: Tensor) -> Tensor:
    sizes = x.norm(dim=1) * y.norm(dim=1)
    return torch.where(sizes > 0, (x * y).sum(1) / sizes, 0.0)


def ratio(x: Tensor, y: Tensor) -> Tensor:
    return x.norm(dim=1) / y.norm(dim=1)


def relative_error(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).norm(dim=1) / y.norm(dim=1).clamp(min=torch.finfo(y.dtype).tiny)


def report(settings: Horizons, agreement: Agreement, out: Path) -> dict[str, run.Figure]:
    """Print how far one step agrees with T; return what goes into the summary."""
    columns = ["step, T", "lr", "lr Σ", "decay", "decay Σ", "M", "M vel.", "M Σ"]
    shown = [("lr", 0), ("lr", 2), ("decay", 0), ("decay", 2), ("M", 0), ("M", 1), ("M", 2)]
    figures: dict[str, run.Figure] = {"t1_relative_error": agreement.error}
    for i, lr in enumerate(settings.lrs):
        rows = []
        for j, point in enumerate(settings.points):
            for k, steps in enumerate(settings.steps):
                found = agreement.cosines[:, :, i, j, k]
                cells = [cell(found[list(PARTS).index(part), rule], part) for part, rule in shown]
                rows.append([f"{point}, {steps}", *cells])
                for part in PARTS:
                    for rule in ("one step", "summed"):
                        name = f"{part.lower()}_{rule.replace(' ', '_')}_cosine_lr{lr:g}_step{point}_t{steps}"
                        figures[name] = round(agreement.mean(part, rule)[i, j, k].item(), 3)
        title = (
            f"Trained with lr {lr:g}: one step (Σ: summed online) against T steps. lr, decay: same sign in "
            f"so many of {settings.networks} networks; M: cosine ± deviation"
        )
        run.show(out, title, columns, rows)
    horizons = [f"T = {steps}" for steps in settings.steps]
    rows = [
        [f"{lr:g}, {point}", *(f"{short(x.mean())} ± {short(x.std(correction=0))}" for x in by_steps)]
        for lr, by_point in zip(settings.lrs, agreement.slopes, strict=True)
        for point, by_steps in zip(settings.points, by_point, strict=True)
    ]
    run.show(out, "dJ/dlr through T steps, mean ± deviation over networks", ["lr, step", *horizons], rows)
    rows = [
        [f"{part}, at lr {lr:g}", *(f"{sizes.nanmedian():.2g}" for sizes in by_steps.movedim(1, 0))]
        for part, by_lr in zip(PARTS, agreement.ratios[:, 0], strict=True)
        for lr, by_steps in zip(settings.lrs, by_lr, strict=True)
    ]
    run.show(out, "‖one step‖ / ‖T steps‖, median over points and networks", ["", *horizons], rows)
    return figures


def cell(cosines: Tensor, part: str) -> str:
    """Return the cosine of M with its deviation over networks; of a number, how many have the same sign."""
    if part == "M":
        return f"{cosines.mean():.2f}±{cosines.std(correction=0):.2f}".replace("0.", ".")
    return str(int((cosines > 0).sum())) if cosines.any() else "zero"


def short(x: Tensor) -> str:
    return f"{x:.0f}" if x.abs() >= 100 else f"{x:.2g}"


def say(settings: Horizons, agreement: Agreement) -> list[str]:
    sentences = [f"T = 1 is the online rule: the two differ by {agreement.error:.0e} of their size at most."]
    longer = [k for k, steps in enumerate(settings.steps) if steps > 1]
    points, farthest = len(settings.points), max(settings.steps)
    for i, lr in enumerate(settings.lrs):
        one, total = (
            [int((agreement.mean(part, rule)[i][:, longer] >= TRUSTED).sum()) for part in PARTS]
            for rule in ("one step", "summed")
        )
        alike = agreement.slopes[i, :, settings.steps.index(farthest)].sign().mean(-1).abs() >= TRUSTED
        sentences.append(
            f"Trained with lr {lr:g}, one step agrees with T > 1 (mean cosine of {TRUSTED} or more) in "
            f"{one[0]} of {len(longer) * points} cases for the learning rate, {one[1]} for momentum and "
            f"{one[2]} for M; summed online, in {total[0]}, {total[1]} and {total[2]}. "
            f"Networks agree with each other on the sign of dJ/dlr through {farthest} steps "
            f"at {alike.sum()} of {points} points."
        )
    return sentences


def log(settings: Horizons, agreement: Agreement, logger: Logger) -> None:
    """Write the mean cosines by T."""
    for k, steps in enumerate(settings.steps):
        for part in PARTS:
            for i, lr in enumerate(settings.lrs):
                for j, point in enumerate(settings.points):
                    value = agreement.mean(part, "summed")[i, j, k]
                    logger.info(steps, {f"cosine of {part}, summed/lr {lr:g}, step {point}": value})


def draw(settings: Horizons, agreement: Agreement, out: Path) -> None:
    """A map for each part and learning rate: dark blue where one step says what T steps say."""
    figure = Figure(figsize=(13, 6.8), layout="constrained")
    figure.suptitle(
        "Do one-step hypergradients point where those through T steps do? "
        f"Mean cosine of {settings.networks} networks; for a single number, 1 is the same sign, -1 the other"
    )
    halves = [figure.add_subfigure(place) for place in figure.add_gridspec(1, 2, width_ratios=(1, 1.12))]
    colours = ScalarMappable(Normalize(-1, 1), "RdBu")
    titles = {
        "one step": "One step: the derivative of the first step alone",
        "summed": "Online: the one-step derivatives, summed over the T steps",
    }
    for half, (rule, title) in zip(halves, titles.items(), strict=True):
        half.suptitle(title, fontweight="bold", fontsize="medium")
        panels = half.subplots(len(PARTS), len(settings.lrs), sharex=True, sharey=True, squeeze=False)
        for row, part in zip(panels, PARTS, strict=True):
            row[0].set_ylabel(f"{PARTS[part]}\nsteps of training before")
            for axes, values in zip(row, agreement.mean(part, rule).numpy(), strict=True):
                axes.imshow(values, cmap=colours.cmap, norm=colours.norm, aspect="auto")
                for (j, k), value in np.ndenumerate(values):
                    colour = "white" if abs(value) > 0.6 else "black"
                    axes.text(k, j, f"{value:.2f}", ha="center", va="center", color=colour, fontsize="small")
        for axes, lr in zip(panels[0], settings.lrs, strict=True):
            axes.set_title(f"trained with lr {lr:g}", fontsize="medium")
        for axes in panels[-1]:
            axes.set_xlabel("T")
            axes.set_xticks(range(len(settings.steps)), [str(t) for t in settings.steps])
            axes.set_yticks(range(len(settings.points)), [str(t) for t in settings.points])
    bar = halves[1].colorbar(colours, ax=halves[1].axes, ticks=[-1, 0, 1], shrink=0.7)
    bar.set_ticklabels(["opposite", "unrelated", "same as\nT steps"])
    figure.savefig(out / "horizons.png", dpi=110)
