"""What learned schedules gain over the best of random ones: tables, figures for the summary, a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from experiments.reporting import statistics
from experiments.reporting.plots import band
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.studies.schedules.learning import Learned, numbers
from experiments.studies.schedules.network import Results
from experiments.studies.schedules.one_cycle import Chosen

LABELS = {
    "learned": "learned: rates, momentum, start",
    "random": "best of the random one-cycle schedules",
    "learned_usual_start": "learned rates and momentum, usual start",
    "random_learned_start": "best of the random ones, learned start",
    "start": "where learning starts: constant",
}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of the layers, of Okabe and Ito's
RANDOM, LEARNED = "black", "#D55E00"


def report(
    out: Path,
    rivals: Sequence[str],
    found: Results,
    spent: Mapping[str, int],
    learned: Learned,
    best: Chosen,
) -> Summary:
    """Show how training ends on fresh draws, and return the figures.

    found: of all rivals, then of what was learned after some of the steps.
    spent: gradients, by rival.
    """
    by_rival = {name: Results(*(x[:, i].double() for x in found)) for i, name in enumerate(rivals)}
    rows = []
    for name, ends in by_rival.items():
        error = ends.training.std() / len(ends.training) ** 0.5
        gradients = f"{spent[name]:,}" if name in spent else "–"
        cells = [f"{ends.training.mean():.4f} ± {error:.4f}", f"{ends.test.mean():.4f}"]
        rows.append([LABELS[name], *cells, f"{ends.accuracy.mean():.2f} %", gradients])
    title = f"After training on {len(found.training)} fresh draws (± standard error); gradients taken before"
    show_table(out, title, ["", "training loss", "test loss", "test accuracy", "gradients"], rows)
    show_scales(out, learned)
    cycle = best.schedule
    rows = [[f"{x:.3g}" for x in (cycle.peak, cycle.warm_up, cycle.final, cycle.momentum, best.losses.min())]]
    columns = ["peak", "warm-up", "peak / last rate", "momentum", "loss on the draws it was chosen on"]
    show_table(out, "The best of the random schedules", columns, rows)
    return figures(by_rival, spent, learned, best) | reached(
        found.training[:, len(rivals) :], learned, by_rival
    )


def show_scales(out: Path, learned: Learned) -> None:
    usual, found = learned.watched[0].loss, learned.meta.loss
    layers = range(1, len(found) // 2 + 1)
    rows = [
        [kind, *(f"{found[f'{kind}{i}'] / usual[f'{kind}{i}']:.2f}" for i in layers)]
        for kind in ("weights", "biases")
    ]
    columns = ["", *(f"layer {i}" for i in layers)]
    show_table(out, "Learned scale of the start, over the usual one", columns, rows)


def figures(
    by_rival: Mapping[str, Results], spent: Mapping[str, int], learned: Learned, best: Chosen
) -> Summary:
    gain = statistics.interval(by_rival["random"].training - by_rival["learned"].training)
    made: Summary = {
        "schedule_numbers": numbers(learned.meta),
        "schedule_meta_steps": len(learned.values),
        "schedule_gain": gain.mean,
        "schedule_gain_low": gain.low,
        "schedule_gain_high": gain.high,
        "schedule_draws": len(by_rival["learned"].training),
        "schedule_draws_ahead": int((by_rival["learned"].training < by_rival["random"].training).sum()),
        "gradients_learned": spent["learned"],
        "gradients_random": spent["random"],
    }
    for name, ends in by_rival.items():
        key = f"schedule_{name}".replace("random", f"best_of_{len(best.losses)}")
        made |= {
            f"{key}_loss": ends.training.mean().item(),
            f"{key}_test_loss": ends.test.mean().item(),
            f"{key}_test_accuracy": ends.accuracy.mean().item(),
        }
    return made


def reached(watched: Tensor, learned: Learned, by_rival: Mapping[str, Results]) -> Summary:
    """Return after which of the steps looked at the learned schedules first are at the best random one's."""
    there = watched.double().mean(0) <= by_rival["random"].training.mean()
    steps = [step for step, at in zip(learned.watched, there, strict=True) if at]
    return {"schedule_meta_steps_to_best_of_random": min(steps, default=None)}


def draw(out: Path, learned: Learned, best: Chosen, watched: Tensor, level: float) -> None:
    """The learned schedules by layer, beside the best random one; and the loss while learning.

    watched: the loss on fresh draws with what was learned after some of the steps; `level` is that of the
        best random schedule.
    """
    figure = Figure(figsize=(13, 8), layout="constrained")
    panels = figure.subplots(2, 2)
    draw_schedules(panels[0, 0], learned, best, "lr", "weights", "Learned learning rates of weights")
    draw_schedules(panels[0, 1], learned, best, "lr", "biases", "Learned learning rates of biases")
    draw_schedules(panels[1, 0], learned, best, "momentum", "weights", "Learned momentum of weights")
    panels[0, 0].legend(fontsize="small")
    axes: Axes = panels[1, 1]
    axes.plot(range(len(learned.values)), learned.values, color="grey", label="on the draws of the step")
    band(axes, list(learned.watched), watched, "on fresh draws (shaded: range)", LEARNED)
    label = f"best of {len(best.losses)} random, on fresh draws"
    axes.axhline(level, color=RANDOM, linestyle="--", label=label)
    axes.set_title("Training loss after the last step, while schedules are learned")
    axes.set_xlabel("step of learning")
    axes.set_yscale("log")
    axes.legend(fontsize="small")
    figure.savefig(out / "schedules.png", dpi=100)


def draw_schedules(axes: Axes, learned: Learned, best: Chosen, field: str, kind: str, title: str) -> None:
    schedules, random = (getattr(meta.hyper, field) for meta in (learned.meta, best.meta))
    for i in range(len(schedules) // 2):
        axes.plot(schedules[f"{kind}{i + 1}"], color=COLOURS[i % len(COLOURS)], label=f"layer {i + 1}")
    axes.plot(random[f"{kind}1"], color=RANDOM, linestyle="--", label="best random one-cycle, all layers")
    axes.set_title(title)
    axes.set_xlabel("step of training")
    if field == "lr":
        axes.set_yscale("log")
