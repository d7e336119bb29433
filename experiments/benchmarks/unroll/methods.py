"""Every method to differentiate through the steps of a training: ours, and the others'."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from experiments.benchmarks.unroll.cases import Batch, Unroll, batch_loss
from experiments.benchmarks.unroll.peers import Grads, by_higher, by_loop, by_torchopt, training_alone
from experiments.benchmarks.unroll.rules import LR
from metafop import Adam, Carry, Estimate, Momentum, ReversibleMomentum, Training, functional
from metafop.hypergradients import Adjoint, autograd
from metafop.protocols import Estimator

Method = Callable[[Sequence[Batch]], Grads]  # one step for each batch

COMPILED: dict[str, Adjoint] = {
    "fast": Adjoint(keep="all", compile=True),
    "sqrt": Adjoint(keep="sqrt", compile=True),
    "frugal": Adjoint(keep="cbrt", compile=True),
    "log": Adjoint(keep="log", compile=True),
    "fast, forward": Adjoint(keep="all", compile=True, over="forward"),
}
EAGER: dict[str, Estimator] = {
    "eager": autograd,
    "eager, all": Adjoint(keep="all"),
    "eager, frugal": Adjoint(keep="sqrt"),
}
PEERS = ("higher", "torchopt")
OTHERS = {"higher": by_higher, "torchopt": by_torchopt, "loop": by_loop, "training": training_alone}
METHODS = (*COMPILED, *EAGER, *OTHERS)


def methods(unroll: Unroll, compiled: bool) -> dict[str, Method]:
    """Return ours, then the peers', the loop that these amount to, and training alone, the floor."""
    # One training for all of ours, so that they share what is compiled for it.
    estimate = estimates(unroll, unroll.rule.ours)
    adjoints = {name: replace(adjoint, compile=compiled) for name, adjoint in COMPILED.items()}
    found: dict[str, Method] = {
        name: partial(_rate_grads, estimate, estimator) for name, estimator in (adjoints | EAGER).items()
    }
    for name, by in OTHERS.items():
        found[name] = partial(by, unroll)
    return found


def estimates(
    unroll: Unroll,
    optimizer: Adam | Momentum | ReversibleMomentum,
    of_training: Callable[..., Tensor] = batch_loss,
    leaves: Tensor | None = None,
) -> Callable[[Estimator, Sequence[Batch]], Estimate]:
    """Return a function from an estimator and batches to its estimate."""
    loss, params, buffers = functional.from_module(unroll.model, of_training)
    judged, _, _ = functional.from_module(unroll.model, batch_loss)
    training = Training(loss, optimizer)
    meta = training.init_meta(params, lr=dict.fromkeys(params, LR), loss=leaves)
    carry = training.init(params, buffers)

    def outer_loss(carry: Carry) -> Tensor:
        return judged(carry.params, carry.buffers, unroll.outer)[0]

    return lambda estimator, batches: estimator(training, outer_loss, meta, carry, batches)


def _rate_grads(
    estimate: Callable[[Estimator, Sequence[Batch]], Estimate], estimator: Estimator, batches: Sequence[Batch]
) -> Grads:
    return estimate(estimator, batches).grads.hyper.lr
