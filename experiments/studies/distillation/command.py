"""Dataset distillation (Wang et al., 2018): ten images that teach a network to read digits."""

import os
from dataclasses import asdict

import torch

from experiments.data import files
from experiments.measuring.cold_start import cold_start
from experiments.reporting.summary import write_summary
from experiments.runner import experiment
from experiments.runner.progress import progress
from experiments.studies.distillation import report
from experiments.studies.distillation.config import PRESETS, Config
from experiments.studies.distillation.learning import SETTINGS, estimators, learn, tested, time_of
from experiments.studies.distillation.problem import draw_start, make_problem
from experiments.vision.task import shortage
from metafop.tensorboard import Logger

__all__ = ["PRESETS", "Config", "main"]


def main(config: Config) -> None:
    if config.data is not None:
        os.environ[files.FOLDER] = str(config.data)
    if why := shortage(config.source, config.images, config.validation, config.test):
        raise SystemExit(why)
    generator = experiment.begin(config)
    problem, ways = make_problem(config), estimators(config)
    measured = len(ways) * (config.rounds + 1)
    with cold_start(), progress(len(SETTINGS) * config.meta_steps + measured) as tick:
        learned = {
            name: learn(config, problem, setting, ways["compiled"], generator, tick)
            for name, setting in SETTINGS.items()
        }
        seconds = time_of(config, problem, generator, tick)
    starts = [draw_start(config, generator) for _ in range(config.fresh)]
    known = {name: tested(config, problem, found.meta, [problem.start]) for name, found in learned.items()}
    fresh = {name: tested(config, problem, found.meta, starts) for name, found in learned.items()}
    figures = report.accuracies(config, known, fresh) | report.times(config, seconds)
    report.draw(config, learned)
    with Logger(config.out) as logger:
        for name, found in learned.items():
            for step, loss in enumerate(found.losses):
                logger.info(step, {f"loss/{name}": loss})
            for step, accuracy in found.accuracy.items():
                logger.info(step, {f"accuracy/{name}": torch.tensor(accuracy)})
            logger.learned(config.meta_steps, {f"rates/{name}": found.meta.hyper.lr})
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    write_summary(config.out, figures)
