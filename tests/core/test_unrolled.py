"""Learning from whole horizons: by hand, with every meta-optimizer, all that can be learned at once."""

import math
from typing import Any, cast

import pytest
import torch
from problems import OPTIMIZERS, assert_near, assert_pure, assert_same_bits, every, mlp
from torch.func import grad

from metafop import (
    SGD,
    Adam,
    Dense,
    Diagonal,
    LowRank,
    Meta,
    Momentum,
    Online,
    Rescaled,
    Scalar,
    Training,
    functional,
    safeguards,
    tree,
)
from metafop.hypergradients import adjoint, autograd
from metafop.optimizers.scheduled import Scheduled
from metafop.unrolled import Unrolled

META_OPTIMIZERS = {
    "sgd": (SGD(), SGD().hyper(lr=8.0)),
    "heavy ball": (Momentum(), Momentum().hyper(lr=4.0, momentum=0.5)),
    "nesterov": (Momentum(nesterov=True), Momentum().hyper(lr=4.0, momentum=0.5)),
    "adam": (Adam(), Adam().hyper(lr=0.2)),
}


def slope(lr=0.1, dtype=torch.float64, **settings):
    """Return a learner of lr where w goes from 0 towards 1, the loss being (w - 1)², and where it starts."""
    training = Training(functional.plain(lambda params, batch: (params["w"] - batch).square()), SGD())
    params = {"w": torch.zeros((), dtype=dtype)}
    learner = Unrolled(training, SGD(), **settings)
    return learner, training.init_meta(params, lr=lr), training.init(params)


def remaining(carry):
    return (carry.params["w"] - 1).square()


def learn(learner, hyper, meta, outer_loss, carry, batches, steps):
    """Return the state after some steps of meta from the same carry, and the info of each."""
    outer_meta, state, infos = learner.init_meta(meta, **hyper._asdict()), learner.init(meta), []
    for _ in range(steps):
        state, info = learner.step(outer_meta, state, outer_loss, carry, batches)
        infos.append(info)
    return state, infos


def prepared(problem, optimizer, hyper, family, generator):
    """Return a training, its meta, its carry, and the loss on the last batch."""
    training = problem.training(optimizer, family)
    meta, carry = (
        training.init_meta(problem.params, generator, **hyper._asdict()),
        training.init(problem.params, problem.buffers),
    )
    return (
        training,
        meta,
        carry,
        lambda carry: problem.loss(carry.params, carry.buffers, problem.batches[-1])[0],
    )


def test_a_step_over_descent_is_the_one_on_paper():
    rho, lr, steps = 0.3, 0.1, 4
    learner, meta, carry = slope(lr)
    state, (info,) = learn(
        learner, SGD().hyper(lr=rho), meta, remaining, carry, steps * [torch.tensor(1.0)], 1
    )
    slope_in_lr = -4 * steps * (1 - 2 * lr) ** (2 * steps - 1)  # the outer loss is (1 - 2 lr)^(2T)
    assert_near(info["value"], torch.tensor((1 - 2 * lr) ** (2 * steps)), rtol=1e-14)
    assert_near(info["norm"], torch.tensor(abs(lr * slope_in_lr)), rtol=1e-13)
    assert_near(state.meta.hyper.lr, torch.tensor(lr * math.exp(-rho * lr * slope_in_lr)), rtol=1e-13)
    assert info["moved"]
    assert info["notes"] == ()


def test_the_carry_after_the_horizon_starts_the_next(generator):
    problem, setting = mlp(generator), OPTIMIZERS["adam, short"]
    training, meta, carry, outer = prepared(problem, setting.optimizer, setting.hyper(), None, generator)
    learner = Unrolled(training, Adam())
    outer_meta, state = learner.init_meta(meta, lr=0.1), learner.init(meta)
    expected = carry
    for _ in range(2):
        for batch in problem.batches:
            expected, _ = training.step(state.meta, expected, batch)
        state, _ = learner.step(outer_meta, state, outer, state.carry or carry, problem.batches)
        assert_near(state.carry, expected, rtol=1e-12)


@every("meta_optimizer, hyper", META_OPTIMIZERS)
def test_any_optimizer_learns_a_learning_rate(meta_optimizer, hyper, generator):
    problem = mlp(generator)
    training, meta, carry, outer = prepared(problem, SGD(), SGD().hyper(lr=0.1), None, generator)
    batches = 4 * problem.batches[-1:]
    state, infos = learn(Unrolled(training, meta_optimizer), hyper, meta, outer, carry, batches, 6)
    values = torch.stack([info["value"] for info in infos])
    assert (values.diff() < 0).all()
    assert values[-1] < 0.9 * values[0]
    assert state.meta.hyper.lr > 2 * meta.hyper.lr


EVERYTHING = {
    "schedules, momentum and matrices": (
        Scheduled(Momentum(), 4, ("lr", "momentum")),
        {"lr": 0.01, "momentum": 0.5},
        Dense(),
        ("lr", "momentum", "precond"),
    ),
    "betas and low rank": (
        Adam(),
        {"lr": 0.01, "betas": (0.8, 0.9)},
        LowRank(rank=1),
        ("lr", "betas", "precond"),
    ),
    "schedules per layer": (Scheduled(SGD(), 4), {"lr": {"*.weight": 0.1, "*.bias": 0.1}}, None, ("lr",)),
}


@every("optimizer, hyper, family, parts", EVERYTHING)
def test_all_that_steers_can_be_learned_together(optimizer, hyper, family, parts, generator):
    problem, steps = mlp(generator), 4
    training, meta, carry, outer = prepared(problem, optimizer, optimizer.hyper(**hyper), family, generator)
    learner = Unrolled(training, Adam(), parts)
    batches = steps * problem.batches[-1:]
    state, infos = learn(learner, Adam().hyper(lr=0.1), meta, outer, carry, batches, 8)
    assert infos[-1]["value"] < 0.95 * infos[0]["value"]
    old, new = tree.named(meta), tree.named(state.meta)
    still = {name for name in old if torch.equal(old[name], new[name])}
    assert still == {name for name in old if not name.removeprefix("hyper.").startswith(parts)}
    schedules = [x for x in tree.leaves(state.meta.hyper) if x.dim() == 1]
    assert all(len(x.unique()) == steps for x in schedules)  # each entry went its own way


def test_an_online_learners_own_learning_rate_is_learned_over_a_horizon(generator):
    problem = mlp(generator)
    training = problem.training(SGD(), Dense())
    meta, carry = training.init_meta(problem.params, lr=0.1), training.init(problem.params)
    online = Online(training, SGD())
    outer_meta, below = online.init_meta(meta, lr=0.01), online.init(meta, carry)

    def final(outer_meta):
        state = below
        for batch in problem.batches[:-1]:
            state, _ = online.step(outer_meta, state, batch)
        return online.evaluate(outer_meta, state, problem.batches[-1]).value

    state, _ = learn(
        Unrolled(online, SGD()),
        SGD().hyper(lr=2.0),
        outer_meta,
        lambda state: online.evaluate(outer_meta, state, problem.batches[-1]).value,
        below,
        problem.batches[:-1],
        1,
    )
    lr = outer_meta.hyper.lr
    expected = lr * torch.exp(-2.0 * lr * grad(final)(outer_meta).hyper.lr)
    torch.testing.assert_close(state.meta.hyper.lr, expected, rtol=1e-12, atol=0)
    assert state.meta.hyper.lr != lr


def test_estimators_that_agree_teach_the_same(generator):
    problem, setting = mlp(generator), OPTIMIZERS["nesterov, decayed"]
    ends = []
    for estimator in (adjoint, autograd):
        rng = torch.Generator().manual_seed(1)
        training, meta, carry, outer = prepared(problem, setting.optimizer, setting.hyper(), LowRank(1), rng)
        learner = Unrolled(training, Adam(), ("hyper", "precond"), estimator)
        ends.append(learn(learner, Adam().hyper(lr=0.01), meta, outer, carry, problem.batches[:-1], 3)[0])
    assert_near(ends[0].meta, ends[1].meta, rtol=1e-9)


def broken(value, factor):
    """Return the adjoint with another value, and grads times a factor."""

    def estimator(training, outer_loss, meta, carry, batches):
        estimate = adjoint(training, outer_loss, meta, carry, batches)
        grads = tree.scale(estimate.grads, factor)
        return estimate._replace(value=estimate.value * value, grads=grads, info={"notes": ("It broke.",)})

    return estimator


@pytest.mark.parametrize(
    ("value", "factor"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_an_estimate_that_is_not_finite_moves_nothing_and_says_so(value, factor):
    learner, meta, carry = slope(estimator=broken(value, factor))
    learner = Unrolled(learner.training, Adam(), estimator=learner.estimator, clip=1.0)
    state, (info,) = learn(learner, Adam().hyper(lr=0.1), meta, remaining, carry, [torch.tensor(1.0)], 1)
    assert not info["moved"]
    assert info["notes"] == ("It broke.",)
    assert info["norm"].isfinite() == math.isfinite(factor)
    assert_same_bits(state[:2], learner.init(meta)[:2])


def test_training_that_overflows_moves_nothing_and_the_estimators_note_is_handed_on():
    learner, meta, carry = slope(lr=1e10)
    state, (info,) = learn(learner, SGD().hyper(lr=0.1), meta, remaining, carry, 40 * [torch.tensor(1.0)], 1)
    assert not info["moved"]
    assert info["overflow"] >= 0
    assert "overflowed" in info["notes"][0]
    assert_same_bits(state.meta, meta)


def test_a_meta_step_that_overflows_is_not_taken():
    learner, meta, carry = slope()
    state, (info,) = learn(learner, SGD().hyper(lr=1e308), meta, remaining, carry, [torch.tensor(1.0)], 1)
    assert not info["moved"]
    assert_same_bits(state.meta, meta)


@pytest.mark.parametrize("factor", [1.0, 1e4, 1e300])
def test_a_clip_shortens_the_hypergradient_however_long_it_is(factor, generator):
    problem = mlp(generator)
    rates = dict.fromkeys(problem.params, 0.1)
    training, meta, carry, outer = prepared(problem, SGD(), SGD().hyper(lr=rates), None, generator)
    learner = Unrolled(training, SGD(), estimator=broken(1.0, factor), clip=1e-3)
    state, (info,) = learn(learner, SGD().hyper(lr=1.0), meta, outer, carry, problem.batches[:-1], 1)
    pulled = adjoint(training, outer, meta, carry, problem.batches[:-1]).grads.hyper.lr
    chained = {name: rates[name] * h for name, h in pulled.items()}
    went = {name: -torch.log(lr / rates[name]) for name, lr in state.meta.hyper.lr.items()}
    assert_near(info["norm"], factor * tree.norm(chained), rtol=1e-12)
    assert_near(went, tree.scale(chained, 1e-3 / tree.norm(chained)), rtol=1e-9)


def test_a_clip_leaves_alone_what_is_short_or_nothing():
    for factor in (1.0, 0.0):
        learner, meta, carry = slope(estimator=broken(1.0, factor))
        clipped = Unrolled(learner.training, SGD(), estimator=learner.estimator, clip=10.0)
        args = (SGD().hyper(lr=0.1), meta, remaining, carry, [torch.tensor(1.0)], 1)
        free, short = learn(learner, *args)[0], learn(clipped, *args)[0]
        assert_same_bits(short, free)


def test_bounds_act_on_what_was_learned_and_times_pass(generator):
    problem = mlp(generator)
    family = Rescaled(Scalar(), limit=0.5)
    training, meta, carry, outer = prepared(problem, SGD(), SGD().hyper(lr=0.1), family, generator)
    learner = Unrolled(training, Adam(), ("precond",), bounds=(safeguards.bound_norm(1.0),))
    state, _ = learn(learner, Adam().hyper(lr=0.1), meta, outer, carry, problem.batches[:-1], 3)
    assert all(m.inner.abs() <= 1.0 for m in state.meta.precond.values())
    assert all(m.time == 4 for m in state.meta.precond.values())
    assert any(m.inner != 1.0 for m in state.meta.precond.values())


def test_a_step_is_pure(generator):
    problem = mlp(generator)
    optimizer = Scheduled(Adam(), 4)
    training, meta, carry, outer = prepared(
        problem, optimizer, optimizer.hyper(lr=0.01), Diagonal(), generator
    )
    learner = Unrolled(training, Adam(), ("lr", "precond"), clip=0.1)

    def step(outer_meta, state, carry, batches):
        state, info = learner.step(outer_meta, state, outer, carry, batches)
        return state, info | {"notes": torch.tensor(len(info["notes"]))}

    assert_pure(step, learner.init_meta(meta, lr=0.1), learner.init(meta), carry, problem.batches)


def test_single_precision_stays_single():
    learner, meta, carry = slope(dtype=torch.float32)
    batches = [torch.tensor(1.0, dtype=torch.float32)]
    state, (info,) = learn(learner, SGD().hyper(lr=0.1), meta, remaining, carry, batches, 1)
    assert {x.dtype for x in (state.meta.hyper.lr, info["value"], info["norm"])} == {torch.float32}


REFUSED = {
    "a class": (lambda: Unrolled(slope()[0].training, cast(Any, SGD)), ["Unrolled", "class SGD", "SGD()"]),
    "a string": (lambda: slope(learn="lr"), ["Unrolled", "learn='lr'", '("precond", "lr")']),
    "one bound": (lambda: slope(bounds=safeguards.bound_norm(1.0)), ["Unrolled", "bounds", "tuple"]),
    "a clip of zero": (lambda: slope(clip=0.0), ["Unrolled", "clip", "0.0", "None"]),
    "a clip that is no number": (lambda: slope(clip="a"), ["Unrolled", "clip", "'a'", "None"]),
    "nothing of that name": (
        lambda: slope(learn=("momentum",))[0].init(slope()[1]),
        ["Unrolled", "'momentum'", "'lr'"],
    ),
    "on the boundary": (
        lambda: slope(learn=("hyper",))[0].init(slope()[1]),
        ["Unrolled", "hyper.weight_decay", "0", "boundary"],
    ),
    "another's hyperparameter": (
        lambda: slope()[0].init_meta(slope()[1], lr=0.1, betas=(0.9, 0.99)),
        ["SGD()", "lr, weight_decay", "got betas", "Adam()"],
    ),
    "the training's meta": (
        lambda: learn_with(Meta(slope()[1].hyper, {"w": ()})),
        ["Unrolled", "unrolled.init_meta(", "['w']", "Pass the former"],
    ),
    "no batches": (
        lambda: learn(slope()[0], SGD().hyper(lr=0.1), slope()[1], remaining, slope()[2], [], 1),
        ["batches"],
    ),
}


def learn_with(outer_meta):
    learner, meta, carry = slope()
    return learner.step(outer_meta, learner.init(meta), remaining, carry, [torch.tensor(1.0)])


@every("act, words", REFUSED)
def test_bad_input_gets_a_clear_sentence(act, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        act()
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message
    assert len(message) < 400
