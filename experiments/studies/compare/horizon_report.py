"""Where one step and T steps agree: tables, sentences, and a map."""

from pathlib import Path

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from experiments.studies.compare.horizons import PARTS, RULES, Agreement, Horizons
from metafop.tensorboard import Logger

TRUSTED = 0.5  # a mean cosine of so much: for a number, three networks in four agree in sign


def report(settings: Horizons, agreement: Agreement, out: Path) -> Summary:
    """Print how far one step agrees with T; return what goes into the summary."""
    columns = ["step, T", "lr", "Σ", "momentum", "Σ", "M", "Σ", "M vel.", "Σ"]
    figures: Summary = {"t1_relative_error": agreement.error}
    for i, lr in enumerate(settings.lrs):
        rows = []
        for j, point in enumerate(settings.points):
            for k, steps in enumerate(settings.steps):
                row = [f"{point}, {steps}"]
                for part, by_rule in zip(PARTS, agreement.cosines[:, :, i, j, k], strict=True):
                    for rule, cosines in zip(RULES, by_rule, strict=True):
                        row.append(cell(cosines, part))
                        name = f"{part} {rule} cosine".lower().replace(" ", "_")
                        figures[f"{name}_lr{lr:g}_step{point}_t{steps}"] = round(cosines.mean().item(), 3)
                rows.append(row)
        title = (
            f"Trained with lr {lr:g}: one step (Σ: summed online) against T steps. lr, momentum: same sign "
            f"in so many of {settings.networks} networks (-: zero); M, by credit: cosine ± deviation"
        )
        show_table(out, title, columns, rows)
    horizons = [f"T = {steps}" for steps in settings.steps]
    rows = [
        [f"{lr:g}, {point}", *(f"{short(x.mean())} ± {short(x.std(correction=0))}" for x in by_steps)]
        for lr, by_point in zip(settings.lrs, agreement.slopes, strict=True)
        for point, by_steps in zip(settings.points, by_point, strict=True)
    ]
    show_table(out, "dJ/dlr through T steps, mean ± deviation over networks", ["lr, step", *horizons], rows)
    rows = [
        [f"{part}, at lr {lr:g}", *(f"{sizes.nanmedian():.2g}" for sizes in by_steps.movedim(1, 0))]
        for part, by_lr in zip(PARTS, agreement.ratios[:, 0], strict=True)
        for lr, by_steps in zip(settings.lrs, by_lr, strict=True)
    ]
    show_table(out, "‖one step‖ / ‖T steps‖, median over points and networks", ["", *horizons], rows)
    return figures


def cell(cosines: Tensor, part: str) -> str:
    """Return the cosine of M with its deviation over networks; of a number, how many have the same sign."""
    if part.startswith("M"):
        return f"{cosines.mean():.2f}±{cosines.std(correction=0):.2f}".replace("0.", ".")
    return str(int((cosines > 0).sum())) if cosines.any() else "-"


def short(x: Tensor) -> str:
    return f"{x:.0f}" if x.abs() >= 100 else f"{x:.2g}"


def conclusions(settings: Horizons, agreement: Agreement) -> list[str]:
    sentences = [f"T = 1 is the online rule: the two differ by {agreement.error:.0e} of their size at most."]
    longer = [k for k, steps in enumerate(settings.steps) if steps > 1]
    points, farthest = len(settings.points), max(settings.steps)
    for i, lr in enumerate(settings.lrs):
        one, total = (
            [int((agreement.mean(part, rule)[i][:, longer] >= TRUSTED).sum()) for part in PARTS]
            for rule in RULES
        )
        alike = agreement.slopes[i, :, settings.steps.index(farthest)].sign().mean(-1).abs() >= TRUSTED
        sentences.append(
            f"Trained with lr {lr:g}, one step agrees with T > 1 (mean cosine of {TRUSTED} or more) in "
            f"{one[0]} of {len(longer) * points} cases for the learning rate, {one[1]} for momentum, "
            f"{one[2]} for M by gradient and {one[3]} by velocity credit; summed online, in {total[0]}, "
            f"{total[1]}, {total[2]} and {total[3]}. "
            f"Networks agree with each other on the sign of dJ/dlr through {farthest} steps "
            f"at {alike.sum()} of {points} points."
        )
    nearer = agreement.mean("M velocity", "summed") > agreement.mean("M", "summed")
    counts = [f"{nearer[:, :, k].sum()} for T = {settings.steps[k]}" for k in longer]
    sentences.append(
        "Summed online, M is nearer to T steps by velocity than by gradient credit in so many of "
        f"{points * len(settings.lrs)} cases: {', '.join(counts)}."
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
    figure = Figure(figsize=(13, 8.2), layout="constrained")
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
            row[0].set_ylabel(f"{PARTS[part]}\nsteps before")
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
    figure.savefig(out / "horizons.png", dpi=100)
