"""MAML on sinusoids: a start that adapts in a few steps, and what learning it takes beside higher's loop."""

from dataclasses import asdict

from torch import Generator

from experiments.measuring.cold_start import cold_start
from experiments.reporting.summary import write_summary
from experiments.runner import experiment
from experiments.runner.extras import require
from experiments.runner.progress import progress
from experiments.studies.maml import cost, figure, report
from experiments.studies.maml.config import PRESETS, Config
from experiments.studies.maml.learning import RECIPES, adapt, learn, unseen_tasks
from experiments.studies.maml.sinusoids import make_problem
from experiments.studies.maml.ways import ways
from metafop.tensorboard import Logger

__all__ = ["PRESETS", "Config", "main"]

THROUGH = (1, 5)  # steps for which every way is measured


def main(config: Config) -> None:
    require("maml", {"higher": "peers"})
    experiment.begin(config)
    problem = make_problem(config.width, config.tasks, config.seed)
    measured = len(THROUGH) * (1 + len(ways(config.compiled)) * (config.rounds + 2))
    with cold_start(), progress(len(RECIPES) * config.meta_steps + measured) as tick:
        learned = {name: learn(config, problem, recipe, tick) for name, recipe in RECIPES.items()}
        costs = {steps: cost.measure(config, steps, tick) for steps in THROUGH}
    unseen = unseen_tasks(config.unseen, config.shots, Generator().manual_seed(config.seed + 1))
    adapted = {name: adapt(problem, found, unseen, config.steps) for name, found in learned.items()}
    figures = report.of_learning(config.out, learned, adapted) | report.largest_errors(costs)
    for steps, found in costs.items():
        figures |= report.of_cost(config.out, steps, found)
    figure.draw(config.out / "maml.png", learned, unseen, adapted, costs)
    with Logger(config.out) as logger:
        report.log(logger, learned, adapted, costs)
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    write_summary(config.out, figures)
