"""What the checks of an estimate cost: with them over without, in time and in memory."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

from experiments.benchmarks.unroll.cases import Case
from experiments.benchmarks.unroll.config import Config
from experiments.benchmarks.unroll.methods import estimates
from experiments.measuring.memory import peak_of_tensors
from experiments.measuring.timing import percent
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table
from metafop import Momentum
from metafop.hypergradients import Adjoint
from metafop.hypergradients.validation import Check
from metafop.protocols import Estimator

UNCHECKED = get_args(Check)
Turns = Callable[[dict[str, Callable[[], Any]], int], dict[str, list[float]]]


def costs(
    cases: dict[str, Case], horizons: Sequence[int], seed: int, compiled: bool, take_turns: Turns
) -> Summary:
    """Return percent of time and bytes, for each case and horizon, by steps as they are and compiled.

    "first" is the first estimate of a training, for which some checks run once.
    """
    figures: Summary = {}
    for name, case in cases.items():
        unroll = case._replace(horizon=max(horizons)).unroll(seed)
        for kind, compiles in ({"eager": False} | ({"compiled": True} if compiled else {})).items():
            estimate = estimates(unroll, Momentum())
            pair = {
                "checked": Adjoint(compile=compiles),
                "unchecked": Adjoint(compile=compiles, skip=UNCHECKED),
            }
            for steps in horizons:
                batches = unroll.batches[:steps]
                runs = {k: partial(estimate, estimator, batches) for k, estimator in pair.items()}
                take_turns(runs, 1)
                seconds = take_turns(runs, case.rounds)
                figures[f"checks_{name}_{kind}_t{steps}_percent"] = percent(*seconds.values())
                figures[f"checks_{name}_{kind}_t{steps}_bytes"] = _bytes(estimate, pair, batches)
                if not compiles:
                    firsts = {k: partial(_first, unroll, estimator, batches) for k, estimator in pair.items()}
                    seconds = take_turns(firsts, case.rounds)
                    figures[f"checks_{name}_first_t{steps}_percent"] = percent(*seconds.values())
    return figures


def show(config: Config, figures: Summary) -> None:
    rows = [[name, str(value)] for name, value in figures.items() if name.startswith("checks_")]
    show_table(config.out, "What the checks cost, with over without", ["figure", "percent or bytes"], rows)


def _first(unroll: Any, estimator: Estimator, batches: Sequence[Any]) -> Any:
    return estimates(unroll, Momentum())(estimator, batches)


def _bytes(estimate: Callable, pair: dict[str, Adjoint], batches: Sequence[Any]) -> int:
    checked, unchecked = (
        peak_of_tensors(lambda given, estimator=estimator: estimate(estimator, given), batches)
        for estimator in pair.values()
    )
    return checked - unchecked
