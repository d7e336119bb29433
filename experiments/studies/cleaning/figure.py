"""The picture of cleaning: accuracy and F1 by what was spent, and the weights in the end."""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reporting.plots import band
from experiments.studies.cleaning.config import Config, Net
from experiments.studies.cleaning.report import LABELS, Found, over_seeds
from experiments.studies.cleaning.runs import MARKS, OfSeed

COLOURS = {"online": "#D55E00", "truncated": "#0072B2", "unrolled": "#009E73", "implicit": "#CC79A7"}
BASELINES = {  # by what a network is trained on anew: which accuracy, line and label
    "all": ("stopped", ":", "all, stopped early"),
    "right": ("accuracy", "--", "labelled right alone"),
    "validation": ("accuracy", "-", "validation alone"),
}
BELOW = 6  # points below the first of these at which the picture begins


def draw(config: Config, found: Found) -> Figure:
    figure = Figure(figsize=(13, 8.5), layout="constrained")
    top, bottom = figure.subplots(2, 2)
    for axes, (name, seeds) in zip(top, found.items(), strict=True):
        net: Net = getattr(config, name)
        curves(axes, net, seeds, "accuracies")
        means = {
            key: sum(getattr(seed.anew[key], field) for seed in seeds) / len(seeds)
            for key, (field, *_) in BASELINES.items()
        }
        for key, (_, line, label) in BASELINES.items():
            axes.axhline(means[key], color="black", linewidth=0.9, linestyle=line, label=label)
        axes.set(title=LABELS[name], ylabel="test accuracy, %", ylim=(means["all"] - BELOW, None))
        axes.legend(fontsize="small", loc="lower right")
    curves(bottom[0], config.mlp, found["mlp"], "f1s")
    bottom[0].set(title="MLP", ylabel="F1 of finding wrong labels")
    histogram(bottom[1], found["mlp"][0])
    return figure


def curves(axes: Axes, net: Net, seeds: Sequence[OfSeed], field: str) -> None:
    spent = net.gradients * torch.arange(MARKS + 1) / MARKS
    for method, colour in COLOURS.items():
        band(axes, spent, over_seeds(seeds, method, field), method, colour)
    axes.set_xlabel("gradients spent")


def histogram(axes: Axes, seed: OfSeed) -> None:
    weights, wrong = seed.learned["online"].weights, seed.digits.wrong
    shown = {"label is right": (weights[~wrong], "#0072B2"), "label is wrong": (weights[wrong], "#D55E00")}
    for label, (values, colour) in shown.items():
        axes.hist(values.tolist(), bins=50, range=(0, 1), alpha=0.6, label=label, color=colour)
    axes.axvline(0.5, color="black", linewidth=0.8)
    axes.set(title="MLP, weights learned online, one seed", xlabel="weight of an example", ylabel="examples")
    axes.legend(fontsize="small")
