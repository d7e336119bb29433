"""What holds for every program: random parameters, losses, optimizers, families, horizons and windows."""

import io
from typing import Any

import by_hand
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import assert_near, assert_same_bits
from programs import Param, Program, Window, over, programs
from torch import Tensor
from torch.func import vmap

from metafop import SGD, Adam, Estimate, Meta, Momentum, Online, tree
from metafop.hypergradients import (
    Forward,
    Truncated,
    adjoint,
    autograd,
    by_autograd,
    closed_form,
    forward,
)

MANY = 60  # learned numbers: beyond, all tangents of Forward would take long


def largest(x: Any) -> float:
    return max((float(leaf.abs().max()) for leaf in tree.leaves(x)), default=0.0)


def assert_agree(actual: Estimate, expected: Estimate) -> None:
    """Compare value, derivatives and carry, the derivatives in units of their largest number."""
    assert_near(actual.value, expected.value, rtol=1e-12)
    assert_near(actual.grads, expected.grads, rtol=1e-9, size=largest(expected.grads))
    assert_near(actual.carry, expected.carry, rtol=1e-10)


def written_out(program: Program, window: Window) -> by_hand.Derivatives:
    training, outer_loss, meta, carry, batches = window

    def loss(params: Any, batch: Tensor, leaves: Any, t: int) -> Tensor:
        return program.loss(params, carry.buffers, batch, leaves if program.has_leaves else None)[0]

    return by_hand.differentiated(training, loss, lambda carry, meta: outer_loss(carry), meta, carry, batches)


@over(150)
@given(programs())
def test_the_whole_graph_and_the_adjoint_are_a_loop_by_hand(program):
    window = program.window()
    expected = written_out(program, window)
    for estimator in (autograd, program.adjoint(window.carry)):
        estimate = estimator(*window)
        assert_near(estimate.value, expected.value, rtol=1e-12)
        assert_near(estimate.grads, expected.grads, rtol=1e-9, size=largest(expected.grads))
        assert_near(estimate.start, expected.start, rtol=1e-9, size=largest(expected.start))
        assert_near(estimate.carry.params, expected.params, rtol=1e-10)
        assert estimate.info["notes"] == ()


@over(50)
@given(programs())
def test_differentiated_forward_they_are_the_same(program):
    window = program.window()
    expected = autograd(*window)
    assert_agree(program.adjoint(window.carry, over="forward")(*window), expected)
    if sum(leaf.numel() for leaf in tree.leaves(window.meta)) <= MANY:
        assert_agree(forward(*window), expected)
    hyper = Forward(learn=("hyper",))(*window).grads.hyper
    assert_near(hyper, expected.grads.hyper, rtol=1e-9, size=largest(expected.grads))


@over(20)
@given(programs(), st.sampled_from([-2.0, 0.0, 0.5, 3.0]))
def test_an_estimate_is_linear_in_the_outer_loss(program, factor):
    training, outer_loss, *rest = program.window()

    def other(carry: Any) -> Tensor:
        return sum(p.sin().sum() for p in carry.params.values())  # pyright: ignore[reportReturnType]

    def both(carry: Any) -> Tensor:
        return outer_loss(carry) + factor * other(carry)

    for estimator in (autograd, program.adjoint(rest[1]), Forward(learn=("hyper",))):
        one, two, total = (estimator(training, loss, *rest) for loss in (outer_loss, other, both))
        expected = tree.add(one.grads, tree.scale(two.grads, factor))
        assert_near(total.grads, expected, rtol=1e-12, size=largest((one.grads, two.grads)))
        assert_near(total.value, one.value + factor * two.value, rtol=1e-12, size=1.0)


@over(30)
@given(programs(least=2))
def test_a_window_cut_in_two_is_the_window(program):
    training, outer_loss, meta, carry, batches = program.window()
    fixed, (first, rest) = (training, outer_loss, meta), (batches[: program.cut], batches[program.cut :])

    ahead = Forward(learn=("hyper",))
    whole = ahead(*fixed, carry, batches)
    second = ahead(*fixed, ahead(*fixed, ahead.init(carry), first).carry, rest)
    assert_near(second.grads, whole.grads, rtol=1e-12, size=largest(whole.grads))
    assert_same_bits((second.value, second.carry.carry), (whole.value, whole.carry))

    back = program.adjoint(carry)
    whole = adjoint(*fixed, carry, batches)
    start = back(*fixed, carry, first)
    second = back(*fixed, start.carry, rest)
    assert_same_bits((second.value, second.carry), (whole.value, whole.carry))
    assert_same_bits(torch.cat([start.info["values"], second.info["values"]]), whole.info["values"])


@over(20)
@given(programs(least=2))
def test_truncated_is_the_mean_of_its_windows(program):
    training, outer_loss, meta, carry, batches = program.window()
    estimate = Truncated(program.cut, program.adjoint(carry))(training, outer_loss, meta, carry, batches)
    windows = []
    for start in range(0, program.steps, program.cut):
        window = (training, outer_loss, meta, carry, batches[start : start + program.cut])
        windows.append(autograd(*window))
        carry = windows[-1].carry
    mean = tree.map(lambda *xs: torch.stack(xs).mean(0), *[window.grads for window in windows])
    assert_near(estimate.grads, mean, rtol=1e-9, size=largest(mean))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, for what it cannot batch
@over(40)
@given(programs(most=4), st.integers(0, 9), st.sampled_from(["autograd", "adjoint", "forward"]))
def test_vmap_over_a_hyperparameter_or_a_leaf_of_the_loss_is_a_loop_over_it(program, which, name):
    training, outer_loss, meta, carry, batches = program.window()
    estimator: Any = {
        "autograd": autograd,
        "adjoint": program.adjoint(carry),
        "forward": Forward(learn=("hyper",)),
    }[name]
    names = [k for k in tree.named(meta) if not k.startswith("precond")]
    swept = names[which % len(names)]
    values = [factor * tree.named(meta)[swept] for factor in (1.0, 0.5, 0.9)]

    def estimated(value: Tensor) -> tuple[Tensor, Meta, Any]:
        return estimator(training, outer_loss, tree.replace(meta, {swept: value}), carry, batches)[:3]

    together, apart = vmap(estimated)(torch.stack(values)), tree.stack([estimated(x) for x in values])
    assert_near(together[1], apart[1], rtol=1e-9, size=largest(apart[1]))
    assert_near(together[::2], apart[::2], rtol=1e-10)


def reloaded(x: Any) -> Any:
    """Return what a file holds of a tree."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


@over(20)
@given(programs(least=2))
def test_training_resumed_from_a_file_is_training_that_never_stopped(program):
    training, outer_loss, meta, carry, batches = program.window()
    first, rest = batches[: program.cut], batches[program.cut :]
    ahead = Forward(learn=("hyper",))
    for estimator, start in ((program.adjoint(carry), carry), (ahead, ahead.init(carry))):
        middle = estimator(training, outer_loss, meta, start, first).carry
        loaded_meta, loaded = reloaded((meta, middle))
        resumed = estimator(training, outer_loss, loaded_meta, loaded, rest)
        assert_same_bits(resumed[:3], estimator(training, outer_loss, meta, middle, rest)[:3])


LEARNERS = [SGD(), Momentum(), Momentum(nesterov=True)]


@over(60)
@given(programs(), st.sampled_from(LEARNERS), st.sampled_from([0.1, 1.0]))
def test_online_by_closed_form_steps_as_by_autograd(program, meta_optimizer, meta_lr):
    training, _, meta, carry, batches = program.window()
    inside = [k for k, x in tree.named(meta).items() if k.startswith("precond") or x.min() > 0]
    assume(inside)
    closed, whole = (
        Online(training, meta_optimizer, tuple(inside), credit="gradient", hypergradient=hypergradient)
        for hypergradient in (closed_form, by_autograd)
    )
    outer_meta, state = closed.init_meta(meta, lr=meta_lr), closed.init(meta, carry, batches[0])
    for batch in batches:
        expected, _ = whole.step(outer_meta, state, batch)
        state, _ = closed.step(outer_meta, state, batch)
        assert_near(state, expected, rtol=1e-9, size=1.0)


# To compile takes long: one program that has most of what there is.
BUILT = Program(
    (
        Param((2, 2, 1, 2), "logsumexp", "rescaled spatial"),
        Param((), "product", "scalar"),
        Param((2, 3), "matmul", "low rank"),
    ),
    Adam(),
    {
        "lr": {"p0": 0.1, "p1": 0.3, "p2": 0.01},
        "betas": (0.3, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.02,
    },
    entries=3,
    has_buffers=True,
    has_leaves=True,
    steps=5,
    cut=2,
    keep="log",
    seed=1,
)


def test_a_compiled_estimate_is_the_eager_one():
    window = BUILT.window()
    assert_agree(BUILT.adjoint(window.carry, compile=True)(*window), autograd(*window))
