"""One changed line: torch's SGD with momentum, and FOP around it, on the same networks and batches."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from matplotlib.figure import Figure
from scipy.special import stdtrit
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import MultiStepLR

import metafop
from experiments import cifar, models, run
from metafop.optim import FOP
from metafop.tensorboard import Logger

MOMENTUM = 0.9
DECAY_AFTER = 0.7  # of the steps, the learning rate is divided by ten
TEST_IMAGES = 2000


@dataclass(frozen=True)
class Config:
    """What changing one line to FOP does to training a 9-layer conv net on CIFAR-10 with momentum.

    Within a seed every method has the same first weights and batches, and is compared with momentum pair by
    pair. Finished runs are kept in `out`, and not repeated while their settings are the same.
    """

    methods: tuple[Literal["momentum", "fop", "paper", "paper_5e-4"], ...] = (
        "momentum",
        "fop",
        "paper",
        "paper_5e-4",
    )  # momentum must be among them
    epochs: int = 15  # times through the images
    images: int = 10_000  # to train on, the first ones
    seeds: int = 5  # networks, and orders of the images
    lr: float = 0.05  # learning rate of every method; a tenth of it after 70 % of the steps
    meta_lr: float | None = None  # learning rate of M of "fop"; if None, the preset's
    interval: int | None = None  # steps for each that "fop" learns from; if None, the preset's
    batch: int = 128  # images in a batch
    narrow: int = 16  # channels of the first three layers
    wide: int = 32  # channels of the layers after
    data: Path | None = None  # folder that holds cifar10/; if None, the environment variable METAFOP_DATA
    seed: int = 0  # the first of the seeds
    threads: int = 1  # that torch may use
    out: Path = Path("runs/drop-in")  # folder for runs, the picture and the numbers

    def __post_init__(self) -> None:
        if "momentum" not in self.methods:
            raise ValueError("methods must have momentum among them: the others are compared with it.")
        if min(self.epochs, self.seeds, self.batch, self.narrow, self.wide) < 1 or self.images < self.batch:
            raise ValueError(
                "epochs, seeds, batch, narrow and wide must be above zero, and images fill a batch."
            )

    @property
    def epoch(self) -> int:
        """Steps in an epoch; images that fill no batch are left out."""
        return self.images // self.batch


class Method(NamedTuple):
    """A name to show, a colour, and the line of a training script that makes the optimizer."""

    label: str
    colour: str
    optimizer: Callable[[nn.Module, Config], Optimizer]


METHODS = {
    "momentum": Method(
        "momentum", "black", lambda model, c: SGD(model.parameters(), lr=c.lr, momentum=MOMENTUM)
    ),
    "fop": Method(
        "FOP",
        "C0",
        lambda model, c: FOP(model, SGD, meta_lr=c.meta_lr, interval=c.interval, lr=c.lr, momentum=MOMENTUM),
    ),
    "paper": Method(
        "FOP, paper", "C1", lambda model, c: FOP(model, SGD, preset="paper", lr=c.lr, momentum=MOMENTUM)
    ),
    "paper_5e-4": Method(
        "FOP, paper at 5e-4",
        "C3",
        lambda model, c: FOP(model, SGD, preset="paper", meta_lr=5e-4, lr=c.lr, momentum=MOMENTUM),
    ),
}


class Result(NamedTuple):
    """Of each seed, the loss on every batch, (seeds, steps), its mean over the last epoch, and accuracy."""

    losses: Tensor
    smoothed: Tensor  # (seeds, steps - epoch + 1): the first is at the end of the first epoch
    accuracy: Tensor


def main(config: Config) -> None:
    data = cifar.load(config.data, config.images, TEST_IMAGES)
    run.begin(config)
    seeds = range(config.seed, config.seed + config.seeds)
    with run.progress(len(config.methods) * config.seeds * config.epochs) as tick:
        # Seed by seed, so that what an interrupted study leaves is whole pairs.
        runs = {
            (name, seed): kept(config, name, seed, data, tick) for seed in seeds for name in config.methods
        }
    results = {name: gathered(config, [runs[name, seed] for seed in seeds]) for name in config.methods}
    figures = compare(config, results)
    draw(config, results)
    with Logger(config.out) as logger:
        for step in range(config.epochs * config.epoch):
            logger.info(
                step, {f"loss/{name}": result.losses[:, step].mean() for name, result in results.items()}
            )
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    run.finish(config.out, figures)


def kept(
    config: Config, name: str, seed: int, data: cifar.Cifar, tick: Callable[[str], None]
) -> dict[str, Any]:
    """Return the losses and the accuracy of a run: those in its file, or of training now."""
    model = network(config, seed)
    optimizer = METHODS[name].optimizer(model, config)
    # As the optimizer has them: a preset that has changed is another setting.
    group = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
    same = {k: getattr(config, k) for k in ("epochs", "images", "batch", "narrow", "wide")}
    versions = {"metafop": metafop.__version__, "torch": torch.__version__}
    settings = json.loads(json.dumps({"seed": seed, **same, "optimizer": group, "versions": versions}))
    file = config.out / "runs" / f"{name}-{seed}.json"
    if file.exists() and (found := json.loads(file.read_text()))["settings"] == settings:
        for _ in range(config.epochs):
            tick(f"{name}, seed {seed}")
        return found
    losses = trained(config, model, optimizer, seed, data, lambda: tick(f"{name}, seed {seed}"))
    result = {"settings": settings, "accuracy": accuracy(model, data), "losses": losses}
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result) + "\n")
    part.replace(file)  # at once: no file holds half a run
    return result


def network(config: Config, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # nn.Module draws its first weights from the global generator
        return models.all_conv(config.narrow, config.wide).float()


def trained(
    config: Config,
    model: nn.Module,
    optimizer: Optimizer,
    seed: int,
    data: cifar.Cifar,
    tick: Callable[[], None],
) -> list[float]:
    """Train, and return the loss on each batch before its step: an ordinary loop, for every optimizer."""
    generator, losses = Generator().manual_seed(seed), []
    scheduler = MultiStepLR(optimizer, [int(DECAY_AFTER * config.epochs * config.epoch)], gamma=0.1)
    for _ in range(config.epochs):
        shuffled = torch.randperm(config.images, generator=generator)
        for batch in shuffled[: config.epoch * config.batch].view(config.epoch, config.batch):
            optimizer.zero_grad()
            loss = cross_entropy(model(data.images[batch]), data.labels[batch])
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        tick()
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, data: cifar.Cifar) -> float:
    model.eval()
    guesses = torch.cat([model(images).argmax(1) for images in data.test_images.split(500)])
    return (guesses == data.test_labels).double().mean().item()


def gathered(config: Config, runs: Sequence[Mapping[str, Any]]) -> Result:
    losses = torch.tensor([run["losses"] for run in runs], dtype=torch.float64)
    accuracies = torch.tensor([run["accuracy"] for run in runs], dtype=torch.float64)
    return Result(losses, losses.unfold(1, config.epoch, 1).mean(2), accuracies)


def steps_to(result: Result, target: Tensor, epoch: int) -> Tensor:
    """Return after how many steps the mean loss of an epoch is first at each seed's target; NaN if never."""
    there = result.smoothed <= target[:, None]
    first = there.double().argmax(1).double() + epoch
    return torch.where(there.any(1), first, math.nan)


def interval(values: Tensor) -> tuple[float | None, float | None, float | None]:
    """Return the mean over seeds and its 95 % t-interval: None if not finite, or of one seed."""
    if not values.isfinite().all():
        return None, None, None
    mean, n = values.mean().item(), len(values)
    if n < 2:
        return mean, None, None
    half = float(stdtrit(n - 1, 0.975)) * values.std().item() / n**0.5
    return mean, mean - half, mean + half


def compare(config: Config, results: Mapping[str, Result]) -> dict[str, run.Figure]:
    """Print every method's differences from momentum, and return the figures."""
    base, total = results["momentum"], config.epochs * config.epoch
    target = base.smoothed[:, -1]
    own = steps_to(base, target, config.epoch) / total
    figures: dict[str, run.Figure] = {
        "momentum_final_loss": rounded(interval(target)[0]),
        "momentum_accuracy": rounded(interval(base.accuracy)[0]),
        # How much of a ratio below one is but the first of several times at that loss.
        "momentum_first_there": rounded(interval(own)[0]),
    }
    rows, by_seed = [], [["momentum", "first there", *(f"{x:.3f}" for x in own.tolist())]]
    for name in (name for name in config.methods if name != "momentum"):
        for view, (values, better) in views(config, results[name], base).items():
            found, shown = interval(values), values
            if view == "steps_ratio":
                found = tuple(None if x is None else math.exp(x) for x in found)
                shown = values.exp()
                figures[f"{name}_never_there"] = int(values.isnan().sum())
            ends = [rounded(x) for x in found]
            figures |= zip((f"{name}_{view}{end}" for end in ("", "_low", "_high")), ends, strict=True)
            ahead = figures[f"{name}_{view}_ahead"] = f"{int((better * values > 0).sum())} of {len(values)}"
            form = "{:.3f}" if view == "steps_ratio" else "{:+.4f}"
            what = [METHODS[name].label, view.replace("_", " ")]
            rows.append([*what, *("–" if x is None else form.format(x) for x in found), ahead])
            by_seed.append([*what, *("–" if math.isnan(x) else form.format(x) for x in shown.tolist())])
    run.show(
        config.out,
        f"Against momentum, pair by pair, with 95 % t-intervals over {config.seeds} seeds. Steps ratio: "
        f"steps until an epoch's mean loss is at momentum's of its last epoch, over the {total} after which "
        "momentum is there by definition; geometric mean; – if a run never is",
        ["method", "what", "mean", "low", "high", "ahead"],
        rows,
    )
    seeds = [f"seed {config.seed + i}" for i in range(config.seeds)]
    run.show(config.out, "The same, seed by seed", ["method", "what", *seeds], by_seed)
    return figures


def views(config: Config, result: Result, base: Result) -> dict[str, tuple[Tensor, int]]:
    """Return how each seed compares with momentum, and the sign of what is better; ratios as logarithms."""
    steps = steps_to(result, base.smoothed[:, -1], config.epoch)
    return {
        "steps_ratio": ((steps / (config.epochs * config.epoch)).log(), -1),
        "mean_loss_difference": ((result.smoothed - base.smoothed).mean(1), -1),
        "final_loss_difference": (result.smoothed[:, -1] - base.smoothed[:, -1], -1),
        "accuracy_difference": (result.accuracy - base.accuracy, 1),
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def draw(config: Config, results: Mapping[str, Result]) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps, base = range(config.epoch, config.epochs * config.epoch + 1), results["momentum"].smoothed
    for name, result in results.items():
        for axes, values in ((left, result.smoothed), (right, result.smoothed - base)):
            low, high = values.amin(0).tolist(), values.amax(0).tolist()
            axes.plot(steps, values.mean(0).tolist(), label=METHODS[name].label, color=METHODS[name].colour)
            axes.fill_between(steps, low, high, color=METHODS[name].colour, alpha=0.15, linewidth=0)
    left.set_ylabel("training loss, mean of the last epoch (nats)")
    left.set_title(f"CIFAR-10, {config.images} images, {config.seeds} seeds: mean and range")
    right.set_ylabel("training loss − momentum's, same seed (nats)")
    right.set_title("Below zero: ahead of momentum")
    for axes in (left, right):
        axes.axvline(DECAY_AFTER * config.epochs * config.epoch, color="grey", linestyle=":", label="lr ÷ 10")
        axes.set_xlabel(f"steps (batches of {config.batch} images)")
        axes.legend(fontsize="small")
    figure.savefig(config.out / "drop_in.png", dpi=150)
