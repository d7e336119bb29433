"""What it costs to learn a leaf of the loss too: with the leaf learned over the same number in the loss."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.benchmarks.unroll.cases import Batch, Case, Unroll, batch_loss
from experiments.benchmarks.unroll.config import Config
from experiments.benchmarks.unroll.methods import estimates
from experiments.measuring.memory import peak_of_tensors
from experiments.measuring.timing import ratio
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from metafop import Estimate, Momentum
from metafop.hypergradients import Adjoint

PENALTY = 1e-4
Turns = Callable[[dict[str, Callable[[], Any]], int], dict[str, list[float]]]


def penalized(model: nn.Module, batch: Batch, penalty: Tensor | float) -> Tensor:
    """A penalty on the squares of all parameters: one number."""
    return batch_loss(model, batch) + penalty * sum(p.square().sum() for p in model.parameters())


def weighted(model: nn.Module, batch: Batch, weights: Tensor) -> Tensor:
    """A weight for each example of a batch."""
    return (weights * cross_entropy(model(batch[0]), batch[1], reduction="none")).mean()


def costs(cases: dict[str, Case], steps: int, seed: int, compiled: bool, take_turns: Turns) -> Summary:
    """Return time and memory with a leaf learned over those without, for each case, leaf and estimator."""
    figures: Summary = {}
    ways = {"eager": Adjoint(keep="all"), "sqrt_eager": Adjoint(keep="sqrt")}
    if compiled:
        ways |= {"fast": Adjoint(keep="all", compile=True), "sqrt": Adjoint(keep="sqrt", compile=True)}
    for name, case in cases.items():
        unroll = case._replace(horizon=steps).unroll(seed)
        leaves = {
            "penalty": (penalized, torch.tensor(PENALTY)),
            "weights": (weighted, torch.ones(case.batch)),
        }
        for leaf, (loss, value) in leaves.items():
            learned = estimates(unroll, Momentum(), loss, value)
            held = estimates(unroll, Momentum(), _held(loss, value))
            for way, adjoint in ways.items():
                found = _compared(unroll, adjoint, learned, held, case.rounds, take_turns)
                figures |= {f"leaf_{name}_{leaf}_{way}_{k}": x for k, x in found.items()}
    return figures


def _held(loss: Callable[..., Tensor], value: Tensor) -> Callable[[nn.Module, Batch], Tensor]:
    """Return the loss with the leaf as a constant of its own."""
    return lambda model, batch: loss(model, batch, value)


def _compared(
    unroll: Unroll,
    adjoint: Adjoint,
    learned: Callable[..., Estimate],
    held: Callable[..., Estimate],
    rounds: int,
    take_turns: Turns,
) -> Summary:
    runs = {"learned": partial(learned, adjoint), "held": partial(held, adjoint)}
    timed = {k: partial(run, unroll.batches) for k, run in runs.items()}
    take_turns(timed, 1)
    seconds = take_turns(timed, rounds)
    peaks = [peak_of_tensors(run, unroll.batches) for run in runs.values()]
    return {"time": ratio(seconds["learned"], seconds["held"]), "memory": round(peaks[0] / peaks[1], 4)}


def show(config: Config, figures: Summary) -> None:
    names = [
        name.removesuffix("_time") for name in figures if name.startswith("leaf_") and name.endswith("_time")
    ]
    rows = [[name, *(f"{figures[f'{name}_{what}']:.3f}" for what in ("time", "memory"))] for name in names]
    show_table(
        config.out,
        "What a learned leaf of the loss costs, over the same number held",
        ["case", "time", "memory"],
        rows,
    )
