"""One signature: what holds for every estimator over many steps, on every model."""

from functools import partial

import pytest
import torch
from problems import ALL_MODELS, FAMILIES, OPTIMIZERS, assert_near, assert_same_bits, every, lstm, mlp, moved

from metafop import Meta, ReversibleMomentum, Training, functional, tree
from metafop.hypergradients import (
    Adjoint,
    Autograd,
    Evolution,
    Forward,
    ReversibleAdjoint,
    Truncated,
    adjoint,
    autograd,
    evolution,
    forward,
    reversible,
)

EXACT = {"adjoint": adjoint, "forward": forward, "log": Adjoint("log"), "one window": Truncated(5)}
FOUR = {k: OPTIMIZERS[k] for k in ("sgd, decayed", "heavy ball, decayed", "nesterov, decayed", "adam, short")}


def unrolled(make, optimizer, hyper, family, generator):
    problem = make(generator)
    training = problem.training(optimizer, family)
    meta = training.init_meta(problem.params, generator, **hyper._asdict())
    meta = Meta(meta.hyper, moved(meta.precond, generator))
    *batches, last = problem.batches

    def outer_loss(carry):
        return problem.loss(carry.params, carry.buffers, last)[0]

    return training, outer_loss, meta, training.init(problem.params, problem.buffers), batches


@every("make", ALL_MODELS)
@every("setting", FOUR)
@every("estimator", EXACT)
def test_exact_estimators_agree(estimator, setting, make, generator):
    problem = unrolled(make, setting.optimizer, setting.hyper(), FAMILIES["low rank"], generator)
    estimate, expected = estimator(*problem), autograd(*problem)
    # The bias of a last layer under softmax has a hypergradient that is nothing but rounding.
    assert_near(estimate.grads, expected.grads, rtol=1e-10, size=1e-2)
    assert_near(estimate.value, expected.value, rtol=1e-12)
    assert_near(estimate.carry, expected.carry, rtol=1e-12)


@every("make", ALL_MODELS | {"lstm": lstm})
@every("family", FAMILIES)
def test_undoing_steps_changes_no_bit_of_the_adjoint(family, make, generator):
    ball = ReversibleMomentum()
    problem = unrolled(make, ball, ball.hyper(lr=0.05, momentum=0.9), family, generator)
    estimate, expected = reversible(*problem), adjoint(*problem)
    assert_same_bits(estimate[:3], expected[:3])
    assert_same_bits(estimate.info["cotangents"], expected.info["cotangents"])


@every("make", ALL_MODELS)
def test_evolution_is_within_its_standard_error(make, generator):
    problem = unrolled(make, *_heavy_ball(), None, generator)
    training, outer_loss, meta, carry, batches = problem
    strategy = Evolution(("lr", "momentum"), pairs=200, sigma=1e-3)
    estimate = strategy(training, outer_loss, meta, strategy.init(carry, generator), batches)
    expected, error = autograd(*problem).grads.hyper, estimate.info["standard_error"].hyper
    for field in ("lr", "momentum"):
        found, true = getattr(estimate.grads.hyper, field), getattr(expected, field)
        assert abs(found - true) < 4 * getattr(error, field) + 1e-4 * abs(true)


def _heavy_ball():
    setting = OPTIMIZERS["heavy ball"]
    return setting.optimizer, setting.hyper()


def quadratic():
    """Return a training in fixed point, which every estimator can take, its meta and its carry."""
    loss = functional.plain(lambda params, batch: params["w"].square().sum())
    ball, params = ReversibleMomentum(), {"w": torch.ones(3)}
    training = Training(loss, ball)
    return training, training.init_meta(params, lr=0.1, momentum=0.9), training.init(params)


class Short:
    def __len__(self):
        return 9

    def __getitem__(self, t):
        if t >= 2:
            raise IndexError(t)


ALL = {
    "autograd": autograd,
    "adjoint": adjoint,
    "reversible": reversible,
    "forward": forward,
    "truncated": Truncated(3),
    "evolution": evolution,
}


@every("estimator", ALL)
@pytest.mark.parametrize(
    ("outer_loss", "batches", "error", "sentence"),
    [
        (None, [], ValueError, "There are no batches"),
        (None, Short(), ValueError, r"run out at step 2, but their len\(\) promises"),
        (
            lambda carry: carry.params["w"],
            [None],
            ValueError,
            r"a scalar, got a tensor of shape \(3,\)\.",
        ),
        (lambda carry: 1.0, [None], TypeError, "returns a floating-point tensor, got float"),
        (lambda carry: torch.ones(()), [None], ValueError, "does not depend on what training moves"),
        (None, iter([None]), TypeError, "cannot be asked twice .* Pass a sequence"),
    ],
    ids=["no steps", "short", "vector", "number", "constant", "iterator"],
)
def test_what_cannot_be_unrolled_is_refused_in_a_sentence(
    outer_loss, batches, error, sentence, estimator, generator
):
    training, meta, carry = quadratic()
    start = evolution.init(carry, generator) if estimator is evolution else carry
    with pytest.raises(error, match=sentence):
        estimator(training, outer_loss or (lambda carry: carry.params["w"].sum()), meta, start, batches)


@every("estimator", {k: e for k, e in ALL.items() if k != "evolution"})
def test_nothing_is_changed_and_the_same_call_gives_the_same_bits(estimator):
    training, meta, carry = quadratic()
    before = tree.copy((meta, carry))
    call = (training, lambda carry: carry.params["w"].square().sum(), meta, carry, 6 * [None])
    assert_same_bits(estimator(*call)[:3], estimator(*call)[:3])
    assert_same_bits((meta, carry), before)


@every("estimator", {"autograd": autograd, "adjoint": adjoint, "forward": Forward(("lr",))})
def test_no_gradient_mode_is_no_hindrance(estimator, generator):
    problem = unrolled(mlp, *_heavy_ball(), None, generator)
    with torch.no_grad():
        silent = estimator(*problem)
    assert_same_bits(silent.grads, estimator(*problem).grads)


STEPS = [("forward", t, 3) for t in (1, 2, 3)]
BACK = [("backward", t, 3) for t in (1, 2, 3)]


@every(
    "make, expected",
    {
        "all": (Adjoint, STEPS + BACK),
        "sqrt": (partial(Adjoint, keep="sqrt"), STEPS + BACK),
        "least memory": (partial(Adjoint, memory=200), STEPS + BACK),
        "autograd": (Autograd, STEPS),
        "forward": (Forward, STEPS),
        "reversible": (ReversibleAdjoint, STEPS + BACK),
    },
)
def test_progress_is_told_of_every_step_once_and_changes_nothing(make, expected):
    said, training = (
        [],
        Training(functional.plain(lambda params, batch: params["w"].square().sum()), ReversibleMomentum()),
    )
    given = training, lambda carry: carry.params["w"].sum(), training.init_meta({"w": torch.ones(2)}, lr=0.1)
    carry, batches = training.init({"w": torch.ones(2)}), 3 * [None]
    estimate = make(progress=lambda *now: said.append(now))(*given, carry, batches)
    assert said == expected
    assert_same_bits(estimate.grads, make()(*given, carry, batches).grads)
