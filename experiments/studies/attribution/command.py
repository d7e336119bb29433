"""What a training digit did to the loss of an unseen one: predicted by derivatives, checked by retraining."""

import time
from dataclasses import asdict

from experiments import data
from experiments.reporting.summary import write_summary
from experiments.runner import experiment
from experiments.runner.progress import progress
from experiments.studies.attribution import figure, report
from experiments.studies.attribution.config import PRESETS, Config
from experiments.studies.attribution.runs import of_rate, of_seed
from metafop.tensorboard import Logger

__all__ = ["PRESETS", "Config", "main"]


def main(config: Config) -> None:
    began = time.perf_counter()
    experiment.begin(config)
    dataset, found, rates = data.load(config.source, config.data), [], []
    lrs = sorted({config.lr, *config.other_lrs})
    with progress(config.seeds * (1 + len(config.dropped)) + len(lrs)) as doing:
        for seed in range(config.seed, config.seed + config.seeds):
            found.append(of_seed(config, dataset, seed, doing))
        for lr in lrs:
            doing(f"learning rate {lr:g}")
            rates.append(of_rate(config, dataset, lr))
    figures = report.by_method(config, found) | report.adjoint(config, found) | report.by_rate(config, rates)
    figures["minutes"] = (time.perf_counter() - began) / 60
    figure.draw(config, found).savefig(config.out / "attribution.png", dpi=150)
    with Logger(config.out) as logger:
        report.log(config, found, logger)
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    write_summary(config.out, figures)
