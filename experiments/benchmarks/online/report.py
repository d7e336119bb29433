"""The figures, the table and the picture of bench-online."""

from dataclasses import asdict
from statistics import median

import torch
from matplotlib.figure import Figure

from experiments.benchmarks.online.config import Config
from experiments.measuring.timing import percent, ratio
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from metafop.tensorboard import Logger

Times = dict[str, dict[str, list[float]]]  # by network and kind, then by case: the plain step first


def figures_of(times: Times) -> Summary:
    figures: Summary = {}
    for group, by_case in times.items():
        plain = next(iter(by_case))
        for case, seconds in by_case.items():
            figures[f"{group}_{case}_ms"] = round(1e3 * median(seconds), 3)
            figures[f"{group}_{case}_over_{plain}"] = ratio(seconds, by_case[plain])
        if "closed" in by_case:
            figures[f"{group}_closed_over_autograd"] = ratio(by_case["closed"], by_case["autograd"])
            figures[f"{group}_checks_percent"] = percent(by_case["default"], by_case["unchecked"])
    return figures


def show(config: Config, times: Times) -> None:
    rows = [
        [group, case, f"{1e3 * median(seconds):.2f}", f"{over:.3f}"]
        for group, by_case in times.items()
        for (case, seconds), over in zip(by_case.items(), _over_plain(by_case).values(), strict=True)
    ]
    show_table(config.out, "One step", ["network", "case", "ms", "over plain"], rows)


def draw(config: Config, times: Times) -> None:
    colors = {"plain": "#999999", "adamw": "#999999", "closed": "#56b4e9", "autograd": "#d55e00"}
    figure = Figure(figsize=(1.8 * len(times) + 1.8, 3.2), layout="constrained")
    panels = figure.subplots(1, len(times), squeeze=False)[0]
    for axes, (group, by_case) in zip(panels, times.items(), strict=True):
        ratios = _over_plain(by_case)
        bars = axes.bar(
            list(ratios), list(ratios.values()), color=[colors.get(case, "#0072b2") for case in ratios]
        )
        axes.bar_label(bars, fmt="%.2f")
        axes.set_title(group.replace("_", ", "))
        axes.margins(y=0.15)
        axes.tick_params(axis="x", rotation=45)
    panels[0].set_ylabel("time over the plain step")
    figure.savefig(config.out / "times.png", dpi=150)


def log(config: Config, times: Times, figures: Summary) -> None:
    with Logger(config.out) as logger:
        for i in range(config.repeats):
            for group, by_case in times.items():
                logger.info(i, {f"{group}/{case}": torch.tensor(s[i]) for case, s in by_case.items()})
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})


def _over_plain(by_case: dict[str, list[float]]) -> dict[str, float]:
    plain = next(iter(by_case.values()))
    return {case: ratio(seconds, plain) for case, seconds in by_case.items()}
