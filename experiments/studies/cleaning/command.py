"""Half the labels are wrong: a weight for each example, learned from clean ones, online and unrolled."""

import time
from collections.abc import Callable
from dataclasses import asdict

from torch import Generator

from experiments import data
from experiments.reporting.summary import write_summary
from experiments.runner import experiment
from experiments.runner.progress import progress
from experiments.studies.cleaning import agreement, figure, report, runs
from experiments.studies.cleaning.config import PRESETS, Config, Net
from experiments.studies.cleaning.methods import methods
from experiments.studies.cleaning.problem import Problem, digits, problem
from experiments.studies.cleaning.runs import OfSeed
from metafop.tensorboard import Logger

__all__ = ["PRESETS", "Config", "main"]


def main(config: Config) -> None:
    began = time.perf_counter()
    experiment.begin(config)
    dataset = data.load(config.source, config.data)
    nets, agreed = {"linear": config.linear, "mlp": config.mlp}, []
    found: dict[str, list[OfSeed]] = {name: [] for name in nets}
    with progress(config.seeds * (1 + 5 * len(nets))) as doing:
        for seed in range(config.seed, config.seed + config.seeds):
            generator = Generator().manual_seed(seed)
            drawn = digits(dataset, config.examples, generator)
            for name, net in nets.items():
                begun = problem(drawn, net.hidden, net.lr, generator)
                found[name].append(
                    of_seed(config, net, begun, lambda what, name=name: doing(f"{name}: {what}"))
                )
            doing("implicit against adjoint")
            begun = problem(drawn, config.linear.hidden, config.agreed_lr, generator)
            agreed.append(agreement.measured(begun, config.agreed))
    figures = report.report(config, found) | report.agreement(config, agreed)
    figures["minutes"] = (time.perf_counter() - began) / 60
    figure.draw(config, found).savefig(config.out / "cleaning.png", dpi=150)
    with Logger(config.out) as logger:
        report.log(found, logger)
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    write_summary(config.out, figures)


def of_seed(config: Config, net: Net, begun: Problem, doing: Callable[[str], None]) -> OfSeed:
    """Learn weights by every method from one start, and train networks anew from it."""
    learned = {}
    for name, method in methods(config, net, begun).items():
        doing(name)
        learned[name] = runs.learned(method, begun, net.gradients)
    doing("trained anew")
    # Weights have a mean of one there, and of about a half where they are learned.
    anew = runs.anew(begun, learned["online"].weights, net.lr / 2, net.steps)
    return OfSeed(begun.digits, learned, anew)
