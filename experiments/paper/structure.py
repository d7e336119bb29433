"""What FOP learns: its matrices over training, their values, their eigenvalues, and whether they whiten."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from torch import Tensor

from experiments.reporting.plots import band
from experiments.reporting.summary import Summary, write_summary
from experiments.reporting.tables import show_table
from experiments.runner import experiment, study
from experiments.runner.presets import Preset
from experiments.runner.runs import Finished
from experiments.runner.settings import FromZero
from experiments.vision.config import PAPER, SMOKE, VisionConfig, common_task, prepare
from experiments.vision.methods import METHODS, Method
from experiments.vision.task import Classify
from metafop import diagnostics

Rule = Literal["fop-paper", "fop"]
BINS = 60  # of the histograms


@dataclass(frozen=True)
class Config(VisionConfig):
    """The paper's figure of what is learned: every P of the 9-layer net on CIFAR-10, over training.

    The printed rule and the default, with lr 0.05 and momentum 0.9. Three panels of the paper: P as an
    image, the values of P, its sorted eigenvalues; and what it describes: the weight of each position of a
    kernel on itself, on its neighbours, and on the others.

    smoke: seconds, on generated images. small: 10,000 images, 16 and 32 channels, 15 epochs, 3 seeds, about 6
    minutes on two cores. paper: 50,000 images, 96 and 192 channels, 150 epochs.
    """

    rules: tuple[Rule, ...] = ("fop-paper", "fop")
    layer: int = 4  # whose P is shown as images, from 1 to 7
    lr: float = 0.05
    decay: FromZero[float] = 8.0  # epochs after which the learning rate is divided by ten
    widths: tuple[int, int] = (16, 32)  # channels of the first three layers, and of the layers after
    out: Path = Path("runs/structure")

    def __post_init__(self) -> None:
        if not 1 <= self.layer <= 7:
            raise ValueError(
                f"layer must be one of the seven with 3×3 kernels, got {self.layer}. Pass 1 to 7."
            )


PRESETS: dict[Preset, Config] = {
    "smoke": Config(
        **SMOKE,
        out=Path("runs/structure-smoke"),
        images=256,
        epochs=2,
        decay=1.0,
        seeds=2,
        batch=32,
    ),
    "small": Config(),
    "paper": Config(**PAPER, out=Path("runs/structure-paper"), decay=80.0),
}


Matrices = Mapping[str, Tensor]  # by rule: (seeds, epochs, layers, 9, 9), with the identity first


def main(config: Config) -> None:
    prepare(config)
    experiment.begin(config)
    tasks = [task(config, name, seed) for seed in config.all_seeds for name in config.rules]
    done = study.carry_out(tasks, config.out, config.workers, config.threads)
    learned = {name: gathered([r for r in done if r.task.method.name == name]) for name in config.rules}
    figures = report(config, learned)
    draw(config, learned)
    write_summary(config.out, figures)


def task(config: Config, name: Rule, seed: int) -> Classify:
    common = common_task(config, Method(name, config.lr), seed)
    return replace(common, decays=(config.decay,), keep_matrices=True)


def gathered(runs: Sequence[Finished]) -> Tensor:
    """Return every P of the layers with 3×3 kernels, after every epoch, (seeds, epochs + 1, layers, 9, 9)."""
    diverged = [r.task.name for r in runs if r.result["diverged"]]
    if diverged:
        raise SystemExit(f"{', '.join(diverged)} diverged, and has no P to show. Pass a smaller --lr.")
    kept = [torch.load(r.folder / "matrices.pt", weights_only=True) for r in runs]
    names = [name for name, p in kept[0][0].items() if p.shape[-1] == 9]
    found = torch.stack([torch.stack([torch.stack([at[k] for k in names]) for at in one]) for one in kept])
    start = torch.eye(9, dtype=found.dtype).expand(len(runs), 1, len(names), 9, 9)
    return torch.cat([start, found], 1).double()


def report(config: Config, learned: Matrices) -> Summary:
    """Show, of each layer in the end, the eigenvalues of P, and what a position weighs on which others."""
    figures: Summary = {}
    rows = []
    for name, matrices in learned.items():
        for i in range(matrices.shape[2]):
            last = matrices[:, -1, i]
            own, near, far = torch.stack([torch.stack(diagnostics.weights(p, (3, 3))) for p in last]).T
            values = torch.linalg.eigvalsh(last)  # (seeds, 9)
            least, most = values[:, 0].mean(), values[:, -1].mean()
            constant = last.sum((1, 2)) / 9  # 1ᵀ P 1 / 1ᵀ 1
            measured = {"self": own, "neighbours": near, "distant": far}
            measured |= {"index": -near / own, "constant": constant}
            for what, value in measured.items():
                figures[f"{name}_layer{i + 1}_{what}"] = round(value.mean().item(), 4)
            figures[f"{name}_layer{i + 1}_eigenvalue_min"] = round(least.item(), 4)
            figures[f"{name}_layer{i + 1}_eigenvalue_max"] = round(most.item(), 4)
            agree = f"{int((near < 0).sum())} of {len(near)}"
            cells = [f"{x.mean():+.3f}" for x in measured.values()]
            spread = f"{least:.3f} to {most:.3f}"
            rows.append([METHODS[name].label, str(i + 1), *cells, agree, spread])
    show_table(
        config.out,
        "Each P in the end, mean over seeds: what a position of the kernel weighs on itself, on its "
        "neighbours and on the others (the identity: 1, 0, 0); the whitening index, -neighbours / self; what "
        "P leaves of a gradient that is the same at all nine (the identity: 1); in how many runs neighbours "
        "weigh less than nothing; and the range of the eigenvalues, whose mean is the weight on itself",
        ["rule", "layer", "self", "neighbours", "distant", "index", "constant", "negative", "eigenvalues"],
        rows,
    )
    return figures


def draw(config: Config, learned: Matrices) -> None:
    draw_images(config, learned)
    draw_histograms(config, learned)
    draw_eigenvalues(config, learned)
    draw_weights(config, learned)


def draw_images(config: Config, learned: Matrices) -> None:
    """P of one layer over training, as images, without the identity that it starts from."""
    epochs = next(iter(learned.values())).shape[1]
    shown = sorted({round(x) for x in torch.linspace(0, epochs - 1, 6).tolist()})
    figure = Figure(figsize=(2.1 * len(shown) + 1, 2.5 * len(learned)), layout="constrained")
    panels = figure.subplots(len(learned), len(shown), squeeze=False)
    for row, (name, matrices) in zip(panels, learned.items(), strict=True):
        moved = matrices[0, :, config.layer - 1] - torch.eye(9)
        limit = moved[shown].abs().max().item()
        colours = ScalarMappable(Normalize(-limit, limit), "RdBu_r")
        for axes, epoch in zip(row, shown, strict=True):
            axes.imshow(moved[epoch].numpy(), cmap=colours.cmap, norm=colours.norm)
            axes.set_title(f"epoch {epoch}", fontsize=9)
            axes.set_xticks([0, 4, 8], ["1", "5", "9"])
            axes.set_yticks([0, 4, 8], ["1", "5", "9"])
        row[0].set_ylabel(f"{METHODS[name].label}\nposition in the kernel")
        figure.colorbar(colours, ax=list(row), label="P − I", shrink=0.8)
    figure.suptitle(f"P − I of layer {config.layer} over training, seed {config.seed}")
    figure.savefig(config.out / "matrices.png", dpi=150)


def draw_histograms(config: Config, learned: Matrices) -> None:
    """The values of P over training, by layer: a column of each panel is the histogram after an epoch."""
    layers = next(iter(learned.values())).shape[2]
    figure = Figure(figsize=(2.1 * layers + 1, 2.9 * len(learned)), layout="constrained")
    panels = figure.subplots(len(learned), layers, squeeze=False, sharex=True, sharey="row")
    for row, (name, matrices) in zip(panels, learned.items(), strict=True):
        low, high = matrices.min().item(), matrices.max().item()
        edges = torch.linspace(low - 1e-3, high + 1e-3, BINS + 1, dtype=torch.float64)
        shares = LogNorm(1 / matrices[:, 0, 0].numel(), 1)
        for i, axes in enumerate(row):
            counts = [torch.histogram(at.flatten(), edges).hist for at in matrices[:, :, i].transpose(0, 1)]
            density = torch.stack(counts, 1) / matrices[:, 0, 0].numel()  # (bins, epochs)
            epochs = torch.arange(density.shape[1] + 1) - 0.5
            axes.pcolormesh(epochs.numpy(), edges.numpy(), density.numpy(), norm=shares, cmap="viridis")
            axes.set_title(f"layer {i + 1}", fontsize=9)
            axes.set_xlabel("epochs")
        row[0].set_ylabel(f"{METHODS[name].label}\nvalue in P")
        figure.colorbar(
            ScalarMappable(shares, "viridis"), ax=list(row), label="share of the values, all seeds"
        )
    figure.savefig(config.out / "histograms.png", dpi=150)


def draw_eigenvalues(config: Config, learned: Matrices) -> None:
    """The eigenvalues of P in the end, sorted, by layer."""
    figure = Figure(figsize=(5.2 * len(learned), 4), layout="constrained")
    for axes, (name, matrices) in zip(
        figure.subplots(1, len(learned), squeeze=False)[0], learned.items(), strict=True
    ):
        for i in range(matrices.shape[2]):
            spectrum = torch.linalg.eigvalsh(matrices[:, -1, i]).flip(-1)
            band(axes, range(1, 10), spectrum, f"layer {i + 1}", _shade(i, matrices.shape[2]))
        axes.axhline(1, color="grey", linestyle=":", linewidth=1)
        axes.set_title(f"{METHODS[name].label}: mean and range over seeds")
        axes.set_xlabel("rank of the eigenvalue")
        axes.set_ylabel("eigenvalue of P in the end")
        axes.legend(fontsize="small", ncols=2)
    figure.savefig(config.out / "eigenvalues.png", dpi=150)


def draw_weights(config: Config, learned: Matrices) -> None:
    """What a position weighs on itself, its neighbours and the others, over training."""
    figure = Figure(figsize=(13, 3.8 * len(learned)), layout="constrained")
    panels = figure.subplots(len(learned), 3, squeeze=False)
    for row, (name, matrices) in zip(panels, learned.items(), strict=True):
        layers = matrices.shape[2]
        for i in range(layers):
            each = [[diagnostics.weights(p, (3, 3)) for p in one] for one in matrices[:, :, i]]
            weights = torch.stack([torch.stack([torch.stack(at) for at in one]) for one in each])
            for j, axes in enumerate(row):
                band(axes, range(weights.shape[1]), weights[..., j], f"layer {i + 1}", _shade(i, layers))
        for axes, what in zip(row, ("itself", "its neighbours", "the others"), strict=True):
            axes.set_title(f"{METHODS[name].label}: on {what}")
            axes.set_xlabel("epochs")
            axes.set_ylabel("mean weight in P (mean and range over seeds)")
            axes.axhline(float(what == "itself"), color="grey", linestyle=":", linewidth=1)
        row[0].legend(fontsize="x-small", ncols=2)
    figure.savefig(config.out / "weights.png", dpi=150)


def _shade(layer: int, layers: int) -> Any:
    """The deeper a layer, the lighter."""
    return colormaps["viridis"](layer / layers)
