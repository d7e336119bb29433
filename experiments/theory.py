"""Theorems 1 and 2 on random problems and on counter-examples: as printed, and corrected."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Generator, Tensor

from experiments import counterexamples, run, theorems
from experiments.counterexamples import BLUE, ORANGE, Curves, Example
from experiments.presets import Preset
from experiments.theorems import WAYS, Descents, Learned
from metafop import tree
from metafop.tensorboard import Logger


@dataclass(frozen=True)
class Config:
    """Theorems 1 and 2 checked on random problems and on counter-examples, as printed and corrected.

    smoke: seconds. small: 4000 quadratics of each kind for Theorem 1, 400 problems of each for Theorem 2,
    2000 steps, about three minutes on one core. paper: 1000 problems instead, about seven minutes.
    """

    preset: Preset = "small"
    quadratics: int = 4000  # of each kind, for Theorem 1
    problems: int = 400  # quadratics, and as many sums of log cosh, for Theorem 2
    steps: int = 2000  # of every run
    dimension: int = 4  # numbers in θ
    meta_lrs: tuple[float, ...] = (0.01, 0.1, 1.0)  # ρ, the learning rates of M in Theorem 2
    limit: float = 0.5  # p∞ of Theorem 2, to be below 1/L = 1
    seed: int = 0  # of all problems and starts
    threads: int = 1
    out: Path = Path("runs/theory")

    def __post_init__(self) -> None:
        if self.dimension < 2:
            raise ValueError(f"dimension={self.dimension} leaves no singular quadratic. Pass 2 or more.")


PRESETS: dict[Preset, Config] = {
    "smoke": Config(preset="smoke", quadratics=200, problems=10, steps=30, out=Path("runs/theory-smoke")),
    "small": Config(),
    "paper": Config(preset="paper", problems=1000, out=Path("runs/theory-paper")),
}


class Kind(NamedTuple):
    label: str
    singular: bool  # PL, but not strongly convex
    largest: float  # eigenvalue that P may have; the smallest is 0.2


KINDS = {  # by name in summary.json
    "definite": Kind("positive definite", False, 1.0),
    "singular": Kind("singular", True, 1.0),
    "wide": Kind("P up to 4", False, 4.0),
}
FUNCTIONS = {  # by name in summary.json: J, and half the side of the box that starts are uniform in
    "quadratic": (theorems.quadratic, 1.0),
    "log_cosh": (theorems.log_cosh, 20.0),
}
CONVERGED = 1e-6  # of J at the start
NEAR = 0.01  # γ is near p∞


def main(config: Config) -> None:
    generator = run.begin(config)
    with run.progress(len(KINDS) + 1 + len(FUNCTIONS) * len(WAYS)) as doing:
        descents = {}
        for name, kind in KINDS.items():
            doing(f"Theorem 1: {kind.label}")
            descents[name] = descend(config, kind, generator)
        doing("counter-examples")
        examples = counterexamples.theorem_1() | counterexamples.theorem_2()
        learned = {name: learn(config, name, generator, doing) for name in FUNCTIONS}
    figures = report_1(config, descents) | report_examples(config, examples) | report_2(config, learned)
    draw(config, descents["definite"]).savefig(config.out / "theory.png", dpi=150)
    run.finish(config.out, figures)


def descend(config: Config, kind: Kind, generator: Generator) -> Descents:
    size = (config.quadratics, config.dimension)
    problems = theorems.spectral(*size, 0.1, 1.0, generator, kind.singular)
    p = theorems.spectral(*size, 0.2, kind.largest, generator)
    m, start = p.factor, torch.randn(*size, generator=generator, dtype=torch.float64)
    claims = theorems.claims(problems, p.curvature)
    worst = {name: theorems.worst(problems, m, c.step) for name, c in claims.items()}
    values = {name: theorems.descend(problems, m, c.step, start, config.steps) for name, c in claims.items()}
    return Descents(claims, worst, values)


def learn(config: Config, name: str, generator: Generator, doing: Any) -> dict[str, Learned]:
    """Return the runs by way of learning on, one for each ρ and problem, as one vmapped program."""
    function, box = FUNCTIONS[name]
    problems = theorems.mixed(config.problems, config.dimension, generator)
    uniform = torch.rand(config.problems, config.dimension, generator=generator, dtype=torch.float64)
    meta_lr = torch.tensor(config.meta_lrs, dtype=torch.float64).repeat_interleave(config.problems)
    start, copies = box * (2 * uniform - 1), len(config.meta_lrs)
    problems, start = tree.map(lambda x: x.repeat(copies, *[1] * (x.dim() - 1)), (problems, start))
    learned = {}
    for key, way in WAYS.items():
        doing(f"Theorem 2: {name.replace('_', ' ')}, {way.label}")
        found = theorems.follow(way, function, problems, start, meta_lr, config.limit, config.steps)
        # A quadratic's gradient is bounded only where the run goes; that of log cosh is everywhere.
        most = found.slope.amax(0) if name == "quadratic" else problems.curvature.norm(dim=1)
        learned[key] = Learned(found, most, meta_lr)
    return learned


def report_1(config: Config, descents: dict[str, Descents]) -> dict[str, run.Figure]:
    """Print how often each claim fails, and return it."""
    figures: dict[str, run.Figure] = {"quadratics_of_each_kind": config.quadratics}
    columns: list[dict[str, str]] = []
    for kind, found in descents.items():
        everywhere, usable = torch.ones_like(found.usable), found.usable
        rises = ~usable & ~(found.values["printed"][-1] <= found.values["printed"][0])
        refused = int((~usable).sum())
        counts = {
            "printed: ρ ≤ 0": ("printed_no_step", refused, len(usable)),
            "printed, ρ ≤ 0: f rises along the run": ("printed_no_step_rises", int(rises.sum()), refused),
        }
        for claim, label, among, suffix in (
            ("printed", "printed, ρ > 0", usable, ""),
            ("proof", "proof's own, ρ > 0", usable, ""),
            ("proof", "proof's own, ρ ≤ 0", ~usable, "_no_step"),
            ("corrected", "corrected", everywhere, ""),
        ):
            for where, fails in found.fails(claim, among).items():
                words = "from the worst start" if where == "worst" else f"along {config.steps} steps"
                key = f"{claim}{suffix}_fails_{where}"
                counts[f"{label}: fails {words}"] = (key, fails, int(among.sum()))
        figures |= {f"theorem1_{kind}_{key}": count for key, count, _ in counts.values()}
        columns.append({label: f"{count} of {total}" for label, (_, count, total) in counts.items()})
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    title = "Theorem 1 on random quadratics: how often it fails"
    run.show(config.out, title, ["", *(KINDS[kind].label for kind in descents)], rows)
    return figures


def report_examples(config: Config, examples: dict[str, Example]) -> dict[str, run.Figure]:
    columns = ["counter-example", "printed", "happens", "corrected", "happens then"]
    rows = [
        [e.statement, *(x if isinstance(x, str) else f"{x:.4g}" for x in e[1:])] for e in examples.values()
    ]
    run.show(config.out, "Counter-examples", columns, rows)
    return {
        f"example_{name}_{key}": value
        for name, example in examples.items()
        for key, value in example._asdict().items()
        if isinstance(value, float)
    }


def report_2(config: Config, learned: dict[str, dict[str, Learned]]) -> dict[str, run.Figure]:
    """Print how often the bounds on ‖P‖ are broken, and where γ and θ end."""
    figures: dict[str, run.Figure] = {}
    norms, ends = [], []
    for name, ways in learned.items():
        for rho in config.meta_lrs:
            words, key = f"{name.replace('_', ' ')}, ρ = {rho:g}", f"theorem2_{name}_rho{rho:g}"
            free = ways["plain"].at(rho)
            said = theorems.bounds(free)
            over = (free.run.log_norm - said.printed).max().item() / math.log(10)
            broken = {
                f"{which}_bound_broken": _share((free.run.log_norm > bound + 1e-9).any(0))
                for which, bound in said._asdict().items()
            }
            norms.append([words, *(_percent(share) for share in broken.values()), _power(over)])
            found = {way: ending(way, learned.at(rho), config.limit) for way, learned in ways.items()}
            ends += [[f"{words}, {WAYS[way].label}", *_cells(numbers)] for way, numbers in found.items()]
            figures |= {f"{key}_{quantity}": share for quantity, share in broken.items()}
            figures[f"{key}_log10_norm_over_printed_bound"] = over
            figures[f"{key}_norm_over_printed_bound"] = 10**over if over < 300 else None
            figures |= {
                f"{key}_{way}_{what}": x for way, numbers in found.items() for what, x in numbers.items()
            }
    columns = ["J", "middle term broken", "printed broken", "corrected broken", "largest ‖P‖ / printed"]
    run.show(config.out, "Theorem 2: bounds on ‖P‖, learned by FOP without γ from M = I", columns, norms)
    columns = ["J, and what M is learned on from", f"γ within {100 * NEAR:g} % of p∞", "largest γ"]
    columns += [f"J ≤ {CONVERGED:g} J₀", "J > J₀", "median λmax/λmin", "corrected broken"]
    title = f"Theorem 2: ends of runs of {config.steps} steps, δ = 1/t², p∞ = {config.limit:g}, L = 1"
    run.show(config.out, title, columns, ends)
    return figures


def ending(way: str, found: Learned, limit: float) -> dict[str, run.Figure]:
    """Return where the runs end; None is what is not there, or not finite."""
    seen = found.run
    gamma, spread = seen.gamma[-1], seen.spread[-1].median().item()
    largest = gamma.nan_to_num(torch.inf).max().item()
    return {
        "gamma_near": _share((gamma / limit - 1).abs() < NEAR) if way != "plain" else None,
        "gamma_largest": largest if math.isfinite(largest) else None,
        "converged": _share(seen.value[-1] <= CONVERGED * seen.value[0]),
        "rose": _share(~(seen.value[-1] <= seen.value[0])),
        "spread": spread if math.isfinite(spread) else None,
        "corrected_broken": _share(theorems.breaks_what_holds(way, found, limit)),
    }


def draw(config: Config, found: Descents) -> Figure:
    """Draw Theorem 1 on two quadratics, the norm of P, and γ; and write the curves to TensorBoard."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    above, below = figure.subplots(2, 2)
    step = min(20, config.steps)
    printed = found.claims["printed"]
    excess = (found.values["printed"][step] / found.values["printed"][0]).log() - step * printed.rate.log()
    order = excess.where(found.usable, -torch.inf).argsort(descending=True)
    events, middle = config.out / "events", int(found.usable.sum()) // 2
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
        said = claim.rate[i] ** torch.arange(len(values))
        curves[f"{name} claim, {claim.rate[i]:.3g} a step"] = (said, colour, "--")
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


def _cells(numbers: dict[str, Any]) -> list[str]:
    """Return them for a table: shares in percent, the others as they are."""
    cells = []
    for key, x in numbers.items():
        if key in ("gamma_largest", "spread"):
            cells.append("overflows" if x is None else f"{x:.3g}")
        else:
            cells.append("" if x is None else _percent(x))
    return cells


def _share(hits: Tensor) -> float:
    return hits.double().mean().item()


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _power(exponent: float) -> str:
    """Return 10 to this power, which may overflow."""
    return f"{10**exponent:.4g}" if exponent < 300 else f"1e{exponent:.0f}"
