"""bfloat16: a loss that computes in it under autocast, and parameters that are in it."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from by_hand import differentiated
from optim_problems import task
from problems import MODELS, assert_clear, assert_near, convnet, every, mlp
from torch import Tensor

from metafop import Adam, Dense, Diagonal, Momentum, Online, Training, tree
from metafop.hypergradients import Adjoint, Forward, adjoint, autograd
from metafop.optim import FOP

pytestmark = pytest.mark.usefixtures("single_precision")
ROUNDING = 0.05  # of bfloat16, over a few steps


@dataclass(frozen=True)
class Half:
    """A training whose loss computes in bfloat16, with what an estimator takes."""

    training: Training
    meta: Any
    carry: Any
    batches: list[Any]

    def outer_loss(self, carry: Any) -> Tensor:
        return self.training.loss(carry.params, carry.buffers, self.batches[-1])[0].float()

    def by_hand(self) -> Any:
        def loss(params, batch, leaves, t):
            return self.training.loss(params, self.carry.buffers, batch)[0]

        given = (self.meta, self.carry, self.batches)
        return differentiated(self.training, loss, lambda carry, meta: self.outer_loss(carry), *given)


def under_autocast(make, generator):
    problem = make(generator)

    def loss(params, buffers, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return problem.loss(params, buffers, batch)

    return half(loss, problem.params, problem.buffers, problem.batches)


def in_bfloat16(make, generator):
    problem = make(generator)
    given = tree.map(
        lambda x: x.bfloat16() if x.is_floating_point() else x,
        (problem.params, problem.buffers, problem.batches),
    )
    return half(problem.loss, *given)


def half(loss, params, buffers, batches):
    training = Training(loss, Momentum())
    meta = training.init_meta(params, lr=0.05, momentum=0.8)
    return Half(training, meta, training.init(params, buffers), batches)


KINDS = {"under autocast": under_autocast, "in bfloat16": in_bfloat16}


@every("make", MODELS)
@every("kind", KINDS)
@every(
    "estimator", {"adjoint": adjoint, "forward over reverse": Adjoint(over="forward"), "autograd": autograd}
)
def test_an_estimate_is_that_of_a_loop_by_hand(estimator, kind, make, generator):
    assert_by_hand(kind(make, generator), estimator)


def test_a_compiled_estimate_under_autocast_is_that_of_a_loop_by_hand(generator):
    assert_by_hand(under_autocast(mlp, generator), Adjoint(compile=True))


def assert_by_hand(window, estimator):
    estimate = estimator(window.training, window.outer_loss, window.meta, window.carry, window.batches)
    expected = window.by_hand()
    assert {x.dtype for x in tree.leaves((window.meta, estimate.grads))} == {torch.float32}
    assert types(estimate.carry) == types(estimate.start) == types(window.carry)
    assert_near(estimate.grads, expected.grads, ROUNDING)
    assert_near(estimate.start.params, expected.start.params, 2 * ROUNDING)


def types(x):
    return [leaf.dtype for leaf in tree.leaves(x)]


@every("make", MODELS)
@every("kind", KINDS)
def test_what_is_learned_online_is_in_float32(kind, make, generator):
    window = kind(make, generator)
    families = {k: Diagonal() if p.dim() < 2 else Dense() for k, p in window.carry.params.items()}
    training = Training(window.training.loss, Momentum(), families)
    meta = training.init_meta(window.carry.params, lr=0.05)
    online = Online(training, Adam(), learn=("precond", "lr", "momentum"))
    outer_meta, state, values = online.init_meta(meta, lr=0.01), online.init(meta, window.carry), []
    for _ in range(20):
        state, info = online.step(outer_meta, state, window.batches[0])
        values.append(info["value"])
        assert info["finite"]
    assert set(types((state.meta, state.meta_opt))) == {torch.float32}
    assert types(state.carry) == types(window.carry)
    assert values[-1] < 0.9 * values[0]


def test_what_torch_cannot_push_forward_under_autocast_is_refused(generator):
    window = under_autocast(convnet, generator)
    assert_clear(
        lambda: Forward(("lr",))(
            window.training, window.outer_loss, window.meta, window.carry, window.batches
        ),
        ["autocast", "batch norm", "adjoint"],
        errors=NotImplementedError,
    )


@pytest.mark.parametrize("half", ["under autocast", "in bfloat16"])
def test_fop_takes_the_steps_of_its_base_in_bfloat16(half, generator):
    """P = I: what is learned moves with a rate of zero."""
    ends = []
    for make in (
        torch.optim.SGD,
        lambda params, **settings: FOP(params, meta_lr=0.0, interval=1, **settings),
    ):
        problem = task(torch.Generator().manual_seed(0), torch.bfloat16 if half == "in bfloat16" else None)
        optimizer = make(problem.params, lr=0.05, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half == "under autocast"):
                loss = problem.loss()
            loss.backward()
            optimizer.step()
        ends.append({str(i): p.detach() for i, p in enumerate(problem.params)})
    assert_near(ends[1], ends[0], ROUNDING)
