"""Which defaults: order, credit, guard, and families for small parameters, measured against momentum."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Generator, Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy

from experiments.reporting.summary import Summary, write_summary
from experiments.reporting.tables import show_table
from experiments.runner import experiment
from experiments.runner.progress import progress
from experiments.runner.settings import FromZero
from experiments.vision import models
from metafop import (
    Adam,
    Identity,
    LowRank,
    Meta,
    Momentum,
    Online,
    Preconditioner,
    Scalar,
    Training,
    assign,
    functional,
    tree,
)
from metafop.tensorboard import Logger


@dataclass(frozen=True)
class Config:
    """How FOP over momentum does on real handwritten digits, by order, credit, guard and family.

    A 9-layer conv net with batch norm; Adam learns the preconditioners. Every method sees the same networks
    and batches as plain momentum, and is compared with it pair by pair.
    """

    lrs: tuple[float, ...] = (0.02, 0.05, 0.1)  # learning rates
    meta_lrs: tuple[float, ...] = (1e-4, 5e-4, 2e-3)  # learning rates of M
    seeds: int = 5  # networks, and orders of the data
    steps: int = 300  # batches to train on
    batch: int = 64  # images in a batch
    narrow: int = 8  # channels of the first three layers
    wide: int = 16  # channels of the layers after
    seed: FromZero[int] = 0  # of the data's split, the networks and the batches
    threads: int = 2  # that torch may use
    out: Path = Path("runs/defaults")  # folder for the picture and the numbers


def small_kernels(family: Preconditioner) -> Callable[[dict[str, Tensor]], dict[str, Preconditioner]]:
    """Return the ordinary families, but `family` for 1×1 kernels."""
    return lambda params: assign(params) | {k: family for k, p in params.items() if p.shape[2:] == (1, 1)}


def vectors(family: Preconditioner) -> Callable[[dict[str, Tensor]], dict[str, Preconditioner]]:
    """Return the ordinary families, but `family` for biases and the scales of norms."""
    return lambda params: assign(params) | {k: family for k, p in params.items() if p.dim() == 1}


@dataclass(frozen=True)
class Method:
    """How to learn, and which families; as it stands, the library's defaults."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    families: Callable[[dict[str, Tensor]], dict[str, Preconditioner]] = assign


METHODS = {
    "as printed": Method({"order": "paper", "credit": "gradient", "guards": ()}),
    "exact order": Method({"credit": "gradient", "guards": ()}),
    "velocity credit": Method({"guards": ()}),
    "default (velocity, scale-free)": Method(),
    "default, 1×1 LowRank": Method(families=small_kernels(LowRank())),
    "default, 1×1 Identity": Method(families=small_kernels(Identity())),
    "default, vectors Scalar": Method(families=vectors(Scalar())),
}


class Problem(NamedTuple):
    """The digits, a network for each seed (stacked), and the batches of each seed: (steps, seeds, batch)."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    loss: Any
    test_loss: Any
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    order: Tensor


class Result(NamedTuple):
    """The loss on each batch, (steps, lrs, meta_lrs, seeds), and on unseen digits in the end."""

    losses: Tensor
    test: Tensor


def main(config: Config) -> None:
    problem = digits(config, experiment.begin(config))
    with progress(config.steps * (1 + len(METHODS))) as tick:
        baseline = plain(config, problem, lambda: tick("momentum"))
        results = {
            name: learned(config, problem, method, lambda name=name: tick(name))
            for name, method in METHODS.items()
        }
    figures, curves = compare(config, baseline, results)
    draw(config, curves)
    with Logger(config.out) as logger:
        for step in range(config.steps):
            values = {"momentum": baseline, **results}
            logger.info(step, {f"loss/{name}": result.losses[step].mean() for name, result in values.items()})
        logger.hyperparameters(asdict(config), {k: v for k, v in figures.items() if isinstance(v, float)})
    write_summary(config.out, figures)


def digits(config: Config, generator: Generator) -> Problem:
    data: Any = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    images = (images - images.mean()) / images.std()
    shuffled = torch.randperm(len(images), generator=generator)
    images, labels = images[shuffled], torch.tensor(data.target)[shuffled]
    held_out = len(images) // 5
    networks = []
    for seed in range(config.seeds):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(
                config.seed + seed
            )  # nn.Module draws its first weights from the global generator
            networks.append(models.all_conv(config.narrow, config.wide, channels=1).float())
    pure = [functional.from_module(network, batch_loss) for network in networks]
    test_loss, _, _ = functional.from_module(copy.deepcopy(networks[0]).eval(), batch_loss)
    shape = (config.steps, config.seeds, config.batch)
    return Problem(
        images=images[held_out:],
        labels=labels[held_out:],
        test_images=images[:held_out],
        test_labels=labels[:held_out],
        loss=pure[0][0],
        test_loss=test_loss,
        params=tree.stack([params for _, params, _ in pure]),
        buffers=tree.stack([buffers for _, _, buffers in pure]),
        order=torch.randint(len(images) - held_out, shape, generator=generator),
    )


def batch_loss(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def plain(config: Config, problem: Problem, tick: Callable[[], None]) -> Result:
    """Train with momentum alone, all learning rates and seeds in one vmapped program."""
    lrs, seeds = grid(config.lrs, range(config.seeds))
    training, first = Training(problem.loss, Momentum()), tree.map(lambda x: x[0], problem.params)
    meta = training.init_meta(first, lr=0.0)

    def step(lr: Tensor, carry: Any, batch: Any) -> Any:
        return training.step(Meta(meta.hyper._replace(lr=lr), meta.precond), carry, batch)

    def step_all(carry: Any, batch: Any) -> Any:
        return vmap(step)(lrs.flatten(), carry, batch)

    carry = vmap(training.init)(*networks(problem, seeds.flatten().long()))
    losses, carry = trained(problem, step_all, carry, seeds.flatten().long(), tick)
    return Result(losses.view(-1, *lrs.shape)[:, :, None], tested(problem, carry).view(lrs.shape)[:, None])


def learned(config: Config, problem: Problem, method: Method, tick: Callable[[], None]) -> Result:
    """Train with FOP over momentum, all learning rates, meta learning rates and seeds in one program."""
    lrs, meta_lrs, seeds = grid(config.lrs, config.meta_lrs, range(config.seeds))
    first = tree.map(lambda x: x[0], problem.params)
    training = Training(problem.loss, Momentum(), method.families(first))
    online = Online(training, Adam(), **method.settings)
    hyper = Momentum().hyper(lr=0.0)
    metas = [
        training.init_meta(first, Generator().manual_seed(config.seed + seed), **hyper._asdict())
        for seed in range(config.seeds)
    ]
    outer_meta = online.init_meta(metas[0], lr=0.0)

    def init(lr: Tensor, precond: Any, params: Any, buffers: Any) -> Any:
        return online.init(Meta(metas[0].hyper._replace(lr=lr), precond), training.init(params, buffers))

    def step(meta_lr: Tensor, state: Any, batch: Any) -> Any:
        return online.step(Meta(outer_meta.hyper._replace(lr=meta_lr), {}), state, batch)

    def step_all(state: Any, batch: Any) -> Any:
        return vmap(step)(meta_lrs.flatten(), state, batch)

    preconds = tree.map(lambda x: x[seeds.flatten().long()], tree.stack([meta.precond for meta in metas]))
    state = vmap(init)(lrs.flatten(), preconds, *networks(problem, seeds.flatten().long()))
    losses, state = trained(problem, step_all, state, seeds.flatten().long(), tick)
    return Result(losses.view(-1, *lrs.shape), tested(problem, state.carry).view(lrs.shape))


def grid(*axes: Sequence[float]) -> tuple[Tensor, ...]:
    """Return, for each axis, its value in every combination: one dimension an axis."""
    return torch.meshgrid(*(torch.tensor(axis, dtype=torch.float32) for axis in axes), indexing="ij")


def networks(problem: Problem, seeds: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters and buffers of the network of each seed."""
    return tree.map(lambda x: x[seeds], (problem.params, problem.buffers))


def trained(
    problem: Problem, step: Callable[[Any, Any], Any], state: Any, seeds: Tensor, tick: Callable[[], None]
) -> tuple[Tensor, Any]:
    """Return the loss on each batch, and the state after the last."""
    losses = []
    for order in problem.order:
        chosen = order[seeds]
        state, info = step(state, (problem.images[chosen], problem.labels[chosen]))
        losses.append(info["value"])
        tick()
    return torch.stack(losses), state


def tested(problem: Problem, carry: Any) -> Tensor:
    """Return the loss on unseen digits, with the running statistics of batch norm."""
    batch = (problem.test_images, problem.test_labels)
    return vmap(lambda params, buffers: problem.test_loss(params, buffers, batch)[0])(
        carry.params, carry.buffers
    )


def compare(
    config: Config, baseline: Result, results: Mapping[str, Result]
) -> tuple[Summary, dict[str, list[tuple[float, float]]]]:
    """Print each method's difference from momentum by meta learning rate; return figures and curves."""
    figures: Summary = {
        "momentum_training_loss": round(baseline.losses.mean().item(), 4),
        "momentum_test_loss": round(baseline.test.mean().item(), 4),
    }
    rows, curves = [], {name: [] for name in results}
    for name, result in results.items():
        key = "_".join("".join(c if c.isalnum() else " " for c in name).split())
        for j, meta_lr in enumerate(config.meta_lrs):
            row = [name, f"{meta_lr:g}"]
            for what, difference in (  # (lrs, seeds), pair by pair
                ("training", (result.losses[:, :, j] - baseline.losses[:, :, 0]).mean(0)),
                ("test", result.test[:, j] - baseline.test[:, 0]),
            ):
                mean, error = difference.mean().item(), standard_error(difference.mean(0))
                ahead = f"{int((difference < 0).sum())} of {difference.numel()}"
                figures[f"{key}_{meta_lr:g}_{what}_difference"] = round(mean, 5)
                figures[f"{key}_{meta_lr:g}_{what}_ahead"] = ahead
                row += [f"{mean:+.4f} ± {error:.4f}", ahead]
                if what == "training":
                    curves[name].append((mean, error))
            rows.append(row)
    columns = ["method", "meta lr", "training loss", "ahead", "test loss", "ahead"]
    show_table(config.out, "FOP minus momentum, pair by pair (below zero: better)", columns, rows)
    return figures, curves


def standard_error(by_seed: Tensor) -> float:
    return (by_seed.std() / len(by_seed) ** 0.5).item() if len(by_seed) > 1 else 0.0


def draw(config: Config, curves: Mapping[str, list[tuple[float, float]]]) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    markers = "osD^vPX"
    for (name, points), marker in zip(curves.items(), markers, strict=True):
        means, errors = zip(*points, strict=True)
        axes.errorbar(config.meta_lrs, means, yerr=errors, label=name, marker=marker, capsize=3)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("meta learning rate (Adam on M)")
    axes.set_ylabel("mean training loss − momentum's")
    axes.set_title("Below zero: faster than momentum (handwritten digits, paired, ± standard error)")
    axes.legend(fontsize="small")
    figure.savefig(config.out / "defaults.png", dpi=150)
