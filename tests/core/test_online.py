"""The online learner: the paper's algorithm to the letter, the exact order, credit, coordinates, towers."""

import math

import pytest
import torch
from himmelblau import descent, himmelblau, states
from problems import OPTIMIZERS, assert_near, assert_same_bits, convnet, every, mlp
from torch.func import grad

from metafop import SGD, Adam, Dense, LowRank, Meta, Momentum, Online, Scalar, tree
from metafop.hypergradients import by_autograd, closed_form


@pytest.mark.parametrize("order", ["paper", "exact"])
def test_algorithm_1_is_followed_to_the_letter_and_the_exact_order_differs_only_in_m_first(order):
    rho, eps = 0.01, 0.001
    training, meta, carry = descent(lr=eps)
    online = Online(training, SGD(), order=order, credit="gradient", guards=())
    theta, m, previous = carry.params["x"], torch.eye(2), None
    for state in states(online, SGD().hyper(lr=rho), meta, carry, [None] * 30):
        g = grad(lambda x: himmelblau({"x": x}, None))(theta)
        new = m
        if previous is not None:
            new = m + rho * eps * (torch.outer(g, previous) + torch.outer(previous, g)) @ m
        used = m if order == "paper" else new
        theta, m, previous = theta - eps * used @ used.T @ g, new, g
        torch.testing.assert_close(state.params["x"], theta, rtol=1e-12, atol=0)
        torch.testing.assert_close(state.meta.precond["x"], m, rtol=1e-12, atol=0)


@pytest.mark.parametrize("learn", ["hyper.lr", "precond"])
@every("setting", OPTIMIZERS)
def test_the_exact_order_descends_the_true_derivative_of_the_next_loss(setting, learn, generator):
    problem = convnet(generator)
    training = problem.training(setting.optimizer, LowRank(2))
    meta = training.init_meta(problem.params, generator, **setting.hyper()._asdict())
    online = Online(training, SGD(), (learn,), credit="gradient", guards=())
    carry = training.init(problem.params, problem.buffers)
    before, after = states(online, SGD().hyper(lr=1e-3), meta, carry, problem.batches)[-2:]

    def loss(meta):
        carry, _ = training.advance(meta, before.last_carry, before.last_seen)
        return training.evaluate(meta, carry, problem.batches[-1]).value

    derivative, old, new = (tree.named(x) for x in (grad(loss)(before.meta), before.meta, after.meta))
    for name in (name for name in old if name.startswith(learn)):
        if learn == "precond":
            expected = old[name] - 1e-3 * derivative[name]
        else:
            expected = old[name] * torch.exp(-1e-3 * old[name] * derivative[name])
        torch.testing.assert_close(new[name], expected, rtol=1e-11, atol=1e-14)


def test_only_what_is_named_is_learned(generator):
    problem = mlp(generator)
    training = problem.training(Momentum(), Scalar())
    meta = training.init_meta(problem.params, lr=0.1, weight_decay=0.01)
    names = set(tree.named(meta))
    for learn in [
        ("lr",),
        ("momentum",),
        ("precond",),
        ("precond.0.weight", "hyper"),
        ("hyper", "precond"),
    ]:
        online = Online(training, Adam(), learn)
        carry = training.init(problem.params, problem.buffers)
        last = states(online, Adam().hyper(lr=0.01), meta, carry, problem.batches)[-1]
        moved = {
            name for name in names if not torch.equal(tree.named(meta)[name], tree.named(last.meta)[name])
        }
        assert moved == {
            n
            for n in names
            if any(n.removeprefix("hyper.").startswith(part) or n.startswith(part) for part in learn)
        }


@pytest.mark.parametrize("credit", ["velocity", "gradient"])
@every("setting", OPTIMIZERS)
def test_the_pullback_to_preconditioners_alone_is_their_part_of_the_whole(setting, credit, generator):
    problem = mlp(generator)
    training = problem.training(setting.optimizer, LowRank(2))
    meta = training.init_meta(problem.params, generator, **setting.hyper()._asdict())
    online = Online(training, SGD(), credit=credit)
    state = states(online, SGD().hyper(lr=1e-3), meta, training.init(problem.params), problem.batches)[-1]
    step = (state.meta, online._last(state)[0], state.params)
    whole, part = training.pullback(*step), training.pullback_to_precond(*step)
    assert_same_bits(part.precond, whole.precond)
    assert_same_bits(part.hyper, tree.zeros_like(whole.hyper))


@pytest.mark.parametrize("meta_optimizer", [SGD(), Momentum(), Momentum(nesterov=True), Adam()], ids=repr)
def test_any_optimizer_is_a_meta_optimizer_and_moves_like_its_own_update(meta_optimizer, generator):
    problem = mlp(generator)
    training = problem.training(SGD(), Dense())
    meta = training.init_meta(problem.params, lr=0.1)
    online = Online(training, meta_optimizer, credit="gradient", guards=())
    outer_meta = online.init_meta(meta, lr=0.01)
    state = online.init(meta, training.init(problem.params))
    m, opt = {f"precond.{k}": x for k, x in meta.precond.items()}, None
    for i, batch in enumerate(problem.batches):
        seen = online.evaluate(outer_meta, state, batch)
        last, _ = online._last(state)
        pulled = {
            f"precond.{k}": x for k, x in training.pullback(state.meta, last, seen.grads).precond.items()
        }
        opt = opt or meta_optimizer.init(m)
        if i > 0:
            m, opt = meta_optimizer.update(outer_meta.hyper, m, opt, pulled)
        state, _ = online.advance(outer_meta, state, seen)
        assert_near({f"precond.{k}": x for k, x in state.meta.precond.items()}, m, 1e-13)


def test_the_first_step_learns_nothing_and_does_not_count_for_adam():
    training, meta, carry = descent(start=(1.0, -2.0))
    online = Online(training, Adam(), guards=())
    first, second = states(online, Adam().hyper(lr=0.1), meta, carry, [None, None])
    assert_same_bits(first.meta, meta)
    assert first.meta_opt.time == 0
    # Adam's first real step has its whole length in every number.
    torch.testing.assert_close(
        (second.meta.precond["x"] - torch.eye(2)).abs(), torch.full((2, 2), 0.1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("hyper", [1e6, 1e2, 1.0])
def test_learning_rates_stay_positive_and_decays_between_zero_and_one_however_large_the_steps(
    hyper, generator
):
    problem = mlp(generator)
    training = problem.training(Momentum())
    meta = training.init_meta(problem.params, lr=0.1, momentum=0.5)
    online = Online(training, SGD(), ("lr", "momentum"), guards=())
    carry = training.init(problem.params)
    for state in states(online, SGD().hyper(lr=hyper), meta, carry, problem.batches * 4):
        assert 0 < state.meta.hyper.lr < math.inf
        assert 0 < state.meta.hyper.momentum < 1


def test_a_learning_rate_per_parameter_is_learned_by_name(generator):
    problem = mlp(generator)
    training = problem.training(SGD())
    meta = training.init_meta(problem.params, lr=dict.fromkeys(problem.params, 0.1))
    rates = {f"hyper.lr.{name}": 0.0 for name in problem.params} | {"hyper.lr.0.weight": 0.5}
    online = Online(training, SGD(), ("lr",))
    last = states(online, SGD().hyper(lr=rates), meta, training.init(problem.params), problem.batches)[-1]
    assert [k for k, lr in last.meta.hyper.lr.items() if lr != 0.1] == ["0.weight"]


def test_autograd_and_closed_form_learn_alike(generator):
    problem = convnet(generator)
    ends = []
    for hypergradient in (by_autograd, closed_form):
        training = problem.training(Adam(), LowRank(2))
        meta = training.init_meta(problem.params, torch.Generator().manual_seed(1), lr=0.01)
        online = Online(training, Adam(), ("precond", "lr"), credit="gradient", hypergradient=hypergradient)
        carry = training.init(problem.params, problem.buffers)
        ends.append(states(online, Adam().hyper(lr=0.01), meta, carry, problem.batches)[-1])
    assert_near(ends[0].params, ends[1].params, 1e-8)
    assert_near(ends[0].meta.hyper, ends[1].meta.hyper, 1e-8)


def test_velocity_credit_differs_from_gradient_credit_only_from_the_third_step_on():
    training, meta, carry = descent(optimizer=Momentum(), hyper=Momentum().hyper(lr=0.001))
    ends = {
        credit: states(
            Online(training, SGD(), credit=credit, guards=()), SGD().hyper(lr=0.01), meta, carry, [None] * 3
        )
        for credit in ("gradient", "velocity")
    }
    assert_same_bits(ends["gradient"][1].params, ends["velocity"][1].params)
    assert not torch.equal(ends["gradient"][2].params["x"], ends["velocity"][2].params["x"])


def test_a_tower_learns_the_meta_learning_rate_by_the_derivative_through_both_storeys():
    training, meta, carry = descent()
    lower = Online(training, SGD(), guards=())
    upper = Online(lower, SGD(), ("lr",), guards=())
    outer_meta = lower.init_meta(meta, lr=0.01)
    before, after = states(upper, SGD().hyper(lr=1e-3), outer_meta, lower.init(meta, carry), [None] * 6)[-2:]

    def loss(lr):
        hyper = Meta(SGD().hyper(lr=lr), {})
        state, _ = lower.advance(hyper, before.last_carry, before.last_seen)
        return lower.evaluate(hyper, state, None).value

    rho = before.meta.hyper.lr
    expected = rho * torch.exp(-1e-3 * rho * grad(loss)(rho))
    torch.testing.assert_close(after.meta.hyper.lr, expected, rtol=1e-12, atol=0)
    assert after.meta.hyper.lr > rho


def test_a_tower_of_three_storeys_trains():
    training, meta, carry = descent()
    first = Online(training, SGD())
    second = Online(first, SGD(), ("lr",))
    third = Online(second, Adam(), ("lr",))
    outer_meta = first.init_meta(meta, lr=0.01)
    above = second.init_meta(outer_meta, lr=0.1)
    state = second.init(outer_meta, first.init(meta, carry))
    ends = states(third, Adam().hyper(lr=0.01), above, state, [None] * 200)
    assert himmelblau(ends[-1].params, None) < 1e-6
