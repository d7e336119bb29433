"""Theorems 1 and 2 on random problems and on counter-examples: as printed, and corrected."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from experiments.paper.theory import counterexamples, figure, report, theorem1, theorem2
from experiments.paper.theory.problems import FUNCTIONS, KINDS, Kind, mixed, spectral
from experiments.paper.theory.theorem1 import Descents
from experiments.paper.theory.theorem2 import RULES, Learned
from experiments.reporting.summary import write_summary
from experiments.runner import experiment
from experiments.runner.presets import Preset
from experiments.runner.progress import progress
from experiments.runner.settings import FromZero
from metafop import tree


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
    seed: FromZero[int] = 0  # of all problems and starts
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


def main(config: Config) -> None:
    generator = experiment.begin(config)
    with progress(len(KINDS) + 1 + len(FUNCTIONS) * len(RULES)) as doing:
        descents = {}
        for name, kind in KINDS.items():
            doing(f"Theorem 1: {kind.label}")
            descents[name] = descend(config, kind, generator)
        doing("counter-examples")
        examples = counterexamples.theorem_1() | counterexamples.theorem_2()
        learned = {name: learn(config, name, generator, doing) for name in FUNCTIONS}
    figures = report.theorem_1(config.out, descents, config.steps)
    figures |= report.counterexamples(config.out, examples)
    figures |= report.theorem_2(config.out, learned, config.meta_lrs, config.limit, config.steps)
    figure.draw(config.out, descents["definite"]).savefig(config.out / "theory.png", dpi=150)
    write_summary(config.out, figures)


def descend(config: Config, kind: Kind, generator: Generator) -> Descents:
    size = (config.quadratics, config.dimension)
    problems = spectral(*size, 0.1, 1.0, generator, kind.singular)
    p = spectral(*size, 0.2, kind.largest, generator)
    m, start = p.factor, torch.randn(*size, generator=generator, dtype=torch.float64)
    claims = theorem1.claims(problems, p.curvature)
    worst = {name: theorem1.worst(problems, m, c.step) for name, c in claims.items()}
    values = {name: theorem1.descend(problems, m, c.step, start, config.steps) for name, c in claims.items()}
    return Descents(claims, worst, values)


def learn(config: Config, name: str, generator: Generator, doing: Any) -> dict[str, Learned]:
    """Return the runs by rule, one for each ρ and problem, as one vmapped program."""
    function, box = FUNCTIONS[name]
    problems = mixed(config.problems, config.dimension, generator)
    uniform = torch.rand(config.problems, config.dimension, generator=generator, dtype=torch.float64)
    meta_lr = torch.tensor(config.meta_lrs, dtype=torch.float64).repeat_interleave(config.problems)
    start, copies = box * (2 * uniform - 1), len(config.meta_lrs)
    problems, start = tree.map(lambda x: x.repeat(copies, *[1] * (x.dim() - 1)), (problems, start))
    learned = {}
    for key, rule in RULES.items():
        doing(f"Theorem 2: {name.replace('_', ' ')}, {rule.label}")
        found = theorem2.follow(rule, function, problems, start, meta_lr, config.limit, config.steps)
        # A quadratic's gradient is bounded only where the run goes; that of log cosh is everywhere.
        most = found.slope.amax(0) if name == "quadratic" else problems.curvature.norm(dim=1)
        learned[key] = Learned(found, most, meta_lr)
    return learned
