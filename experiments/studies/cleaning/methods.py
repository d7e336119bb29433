"""Four ways to learn the weights of examples. Each goes on for as long as it is asked for the next step."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from experiments.studies.cleaning.config import Config, Net
from experiments.studies.cleaning.problem import Problem, at_rate, clean
from metafop import Adam, Online, Unrolled, functional
from metafop.hypergradients import ConjugateGradients, Implicit, adjoint
from metafop.protocols import Estimator
from metafop.types import Params

LEARN = ("loss.weights",)
ITERATIONS = 5  # of conjugate gradients: each solution starts a step of the weights alone


class Learned(NamedTuple):
    """The network and the weights after a step of the weights."""

    params: Params
    weights: Tensor


def methods(config: Config, net: Net, problem: Problem) -> dict[str, Iterator[Learned]]:
    rates, slower = net.meta_rates, at_rate(problem, net.unrolled_lr)
    few = Implicit(ConjugateGradients(ITERATIONS, tolerance=1e-2), damping=config.damping)
    return {
        "online": online(problem, rates.online),
        "truncated": unrolled(problem, rates.truncated, adjoint, config.window, goes_on=True),
        "unrolled": unrolled(slower, rates.unrolled, adjoint, config.horizon, goes_on=False),
        "implicit": unrolled(problem, rates.implicit, few, config.window, goes_on=True),
    }


def online(problem: Problem, lr: float) -> Iterator[Learned]:
    """Learn at every step, by the derivative of the last one."""
    pair = (problem.digits.training, problem.digits.validation)
    learner = Online(problem.training, Adam(), LEARN, validation=functional.plain(clean))
    outer_meta = learner.init_meta(problem.meta, lr=lr)
    state = learner.init(problem.meta, problem.carry, pair)
    while True:
        state, _ = learner.step(outer_meta, state, pair)
        yield Learned(state.params, state.meta.loss["weights"])


def unrolled(
    problem: Problem, lr: float, estimator: Estimator, steps: int, goes_on: bool
) -> Iterator[Learned]:
    """Learn after so many steps, by the derivative through all of them or at their end.

    The next ones go on from where the last have ended, or start anew.
    """
    learner = Unrolled(problem.training, Adam(), LEARN, estimator)
    outer_meta, state = learner.init_meta(problem.meta, lr=lr), learner.init(problem.meta)
    carry, batches = problem.carry, steps * [problem.digits.training]
    while True:
        state, _ = learner.step(
            outer_meta,
            state,
            lambda carry: clean(carry.params, problem.digits.validation),
            carry,
            batches,
        )
        carry = state.carry if goes_on else carry
        yield Learned(state.carry.params, state.meta.loss["weights"])
