"""The one-step hypergradient: by hand, by autograd, by differences, on paper, and with credit."""

import pytest
import torch
from problems import FAMILIES, HARD_MODELS, OPTIMIZERS, assert_near, convnet, every, mlp, moved, taken
from torch.func import grad, vjp

from metafop import (
    SGD,
    Adam,
    Dense,
    Given,
    Last,
    LowRank,
    Meta,
    Momentum,
    Online,
    Tasks,
    Training,
    functional,
    tree,
)
from metafop.hypergradients import by_autograd, closed_form

# One optimizer of each kind, with a family of each kind.
SELECTION = {
    f"{o}, {f}": (OPTIMIZERS[o], FAMILIES[f])
    for o, f in [
        ("sgd, decayed", "dense"),
        ("heavy ball, decayed", "low rank"),
        ("nesterov, decayed", "normalized dense"),
        ("adam, short", "kronecker"),
        ("adam, short", "rescaled spatial"),
        ("sgd", "bounded diagonal"),
    ]
}
CREDITED = {k: s for k, s in OPTIMIZERS.items() if not isinstance(s.optimizer, SGD)}


def third_step(problem, setting, family, generator, hyper=None):
    """Return a training, a meta that has learned something, the third step, and what was seen after it."""
    training = problem.training(setting.optimizer, family)
    meta = training.init_meta(problem.params, generator, **(hyper or setting.hyper())._asdict())
    meta = Meta(meta.hyper, moved(meta.precond, generator))
    last, seen = taken(training, meta, training.init(problem.params, problem.buffers), problem.batches[:4])
    return training, meta, last, seen


def terms(training, meta, last, cotangent):
    """Return ‖c‖ ‖Δθ‖, the size of the terms that a hypergradient adds up; the sum can come to nothing."""
    after, _ = training.advance(meta, last.carry, last.seen)
    return tree.norm(cotangent) * tree.norm({k: after.params[k] - p for k, p in last.carry.params.items()})


@every("make", HARD_MODELS)
@every("family", FAMILIES)
@every("setting", OPTIMIZERS)
def test_the_closed_form_is_the_derivative_by_autograd(setting, family, make, generator):
    problem = make(generator)
    by_name = {k: dict.fromkeys(problem.params, v) for k, v in setting.hyper()._asdict().items()}
    training, meta, last, seen = third_step(problem, setting, family, generator, setting.hyper(**by_name))
    written, size = closed_form(training, meta, last, seen.grads), terms(training, meta, last, seen.grads)
    assert_near(written, by_autograd(training, meta, last, seen.grads), rtol=1e-10, size=size)


@every("make", HARD_MODELS)
@every("family", FAMILIES)
@every("setting", OPTIMIZERS)
def test_the_next_gradient_pulled_back_is_the_derivative_of_the_next_loss(setting, family, make, generator):
    problem = make(generator)
    training, meta, last, seen = third_step(problem, setting, family, generator)

    def next_loss(meta):
        after, _ = training.advance(meta, last.carry, last.seen)
        return training.evaluate(meta, after, problem.batches[3]).value

    pulled, size = closed_form(training, meta, last, seen.grads), terms(training, meta, last, seen.grads)
    assert_near(pulled, grad(next_loss)(meta), rtol=1e-12, size=size)


def difference(training, meta, last, cotangent, name, way):
    """Return the derivative of ⟨cotangent, new params⟩ in one leaf, along `way`, by a central difference."""
    leaf, h = tree.named(meta)[name], 1e-5

    def at(moved):
        return training.advance(tree.replace(meta, {name: moved}), last.carry, last.seen)[0].params

    ahead, behind = at(leaf + h * way), at(leaf - h * way)
    return sum(tree.dot(c, ahead[k] - behind[k]) for k, c in cotangent.items()) / (2 * h)


@pytest.mark.parametrize("hypergradient", [closed_form, by_autograd])
@every("setting, family", SELECTION)
def test_the_derivative_is_that_of_finite_differences(setting, family, hypergradient, generator):
    training, meta, last, seen = third_step(convnet(generator), setting, family, generator)
    leaves = {k: leaf for k, leaf in tree.named(meta).items() if not k.endswith("time")}
    ways = {k: leaf * torch.randn(leaf.shape, generator=generator) for k, leaf in leaves.items()}
    pulled = tree.named(hypergradient(training, meta, last, seen.grads))
    along = {k: tree.dot(way, pulled[k]) for k, way in ways.items()}
    differences = {k: difference(training, meta, last, seen.grads, k, way) for k, way in ways.items()}
    assert_near(along, differences, rtol=1e-6)


@every("setting", OPTIMIZERS)
def test_at_zero_low_rank_has_no_hypergradient(setting, generator):
    training, meta, last, seen = third_step(mlp(generator), setting, LowRank(rank=2), generator)
    at_zero = Meta(meta.hyper, tree.zeros_like(meta.precond))
    pulled = closed_form(training, at_zero, last, seen.grads).precond
    assert tree.leaves(pulled)
    assert all(torch.equal(leaf, torch.zeros_like(leaf)) for leaf in tree.leaves(pulled))


def total(x, y):
    """Return ⟨x, y⟩ over all parameters."""
    return sum((x[k] * y[k]).sum() for k in x)


@every("setting", {k: OPTIMIZERS[k] for k in ("sgd", "heavy ball", "nesterov")})
def test_descent_has_the_derivatives_on_paper(setting, generator):
    training, meta, last, seen = third_step(mlp(generator), setting, Dense(), generator)
    pulled, p, g = closed_form(training, meta, last, seen.grads), last.seen.grads, seen.grads
    lr, momentum = setting.values["lr"], setting.values.get("momentum", 0.0)
    ahead = 1 + momentum if setting.optimizer == Momentum(nesterov=True) else 1.0
    for k, m in meta.precond.items():
        big_g, big_p = (x[k].reshape(-1, len(m)).mT for x in (g, p))
        assert_near(
            pulled.precond[k], -lr * ahead * (big_g @ (big_p.mT @ m) + big_p @ (big_g.mT @ m)), rtol=1e-12
        )

    q = {k: (p[k].reshape(-1, len(m)) @ m @ m.mT).reshape(p[k].shape) for k, m in meta.precond.items()}
    v = last.carry.opt or tree.zeros_like(p)
    if setting.optimizer == Momentum(nesterov=True):
        move, d_momentum = (
            {k: q[k] + momentum * (momentum * v[k] + q[k]) for k in q},
            {k: 2 * momentum * v[k] + q[k] for k in q},
        )
    else:
        move, d_momentum = {k: momentum * v[k] + q[k] for k in q}, v
    assert_near(pulled.hyper.lr, -total(g, move), rtol=1e-12)
    if momentum:
        assert_near(pulled.hyper.momentum, -lr * total(g, d_momentum), rtol=1e-12)


def test_adam_has_the_derivative_on_paper(generator):
    setting = OPTIMIZERS["adam, short"]
    training, meta, last, seen = third_step(mlp(generator), setting, Dense(), generator)
    lr, (beta1, beta2), eps, _ = setting.hyper()
    c1, c2 = 1 - beta1**3, 1 - beta2**3
    expected = {}
    for k, m in meta.precond.items():
        p, g, mean, square = (
            x[k].reshape(-1, len(m)).mT
            for x in (last.seen.grads, seen.grads, last.carry.opt.mean, last.carry.opt.square)
        )
        q = m @ m.mT @ p
        ahead = (beta1 * mean + (1 - beta1) * q) / c1
        root = ((beta2 * square + (1 - beta2) * q**2) / c2).sqrt()
        below = root + eps
        w = (1 - beta1) / (c1 * below) - ahead / below**2 * (1 - beta2) / c2 * q / root
        expected[k] = -lr * ((w * g) @ p.mT + p @ (w * g).mT) @ m
    assert_near(closed_form(training, meta, last, seen.grads).precond, expected, rtol=1e-12)


def through_the_velocity(training, meta, record, cotangent):
    """Return the derivative in precond through the velocity of all steps, gradients and parameters held."""

    def params(precond):
        new, velocity = {}, training.optimizer.init(cotangent)
        for carry, seen in record:
            q = training.precondition(precond, seen.grads)
            new, velocity = training.optimizer.update(meta.hyper, carry.params, velocity, q)
        return new

    return vjp(params, meta.precond)[1](cotangent)[0]


def through_the_first_moment(training, meta, record, cotangent):
    """Return the derivative in precond through Adam's first moment of all steps, its second moment held."""
    (carry, seen), (lr, (beta1, beta2), eps, weight_decay) = record[-1], meta.hyper
    _, opt = training.optimizer.update(
        meta.hyper, carry.params, carry.opt, training.precondition(meta.precond, seen.grads)
    )

    def params(precond):
        mean = tree.zeros_like(cotangent)
        for _, seen in record:
            q = training.precondition(precond, seen.grads)
            mean = {k: beta1 * u + (1 - beta1) * q[k] for k, u in mean.items()}
        ahead = tree.scale(mean, 1 / (1 - beta1**opt.time))
        below = tree.map(lambda v: (v / (1 - beta2**opt.time)).sqrt() + eps, opt.square)
        return {k: p * (1 - lr * weight_decay) - lr * ahead[k] / below[k] for k, p in carry.params.items()}

    return vjp(params, meta.precond)[1](cotangent)[0]


@every("family", FAMILIES)
@every("setting", CREDITED)
def test_with_credit_it_is_the_derivative_through_all_that_moved(setting, family, generator):
    problem = convnet(generator)
    training = problem.training(setting.optimizer, family)
    meta = training.init_meta(problem.params, generator, **setting.hyper()._asdict())
    meta = Meta(meta.hyper, moved(meta.precond, generator))
    carry, record, credit = training.init(problem.params, problem.buffers), [], ()
    memory = training.init_memory(carry)
    for batch in problem.batches[:4]:
        seen = training.evaluate(meta, carry, batch)
        record.append((carry, seen))
        credit, memory = training.credited(meta, memory, seen.grads)
        carry, _ = training.advance(meta, carry, seen)
    cotangent = training.evaluate(meta, carry, problem.batches[4]).grads
    before, seen = record[-1]
    last = Last(before, seen, credit)
    unrolled = through_the_first_moment if isinstance(setting.optimizer, Adam) else through_the_velocity
    assert_near(
        training.pullback(meta, last, cotangent).precond,
        unrolled(training, meta, record, cotangent),
        rtol=1e-12,
        size=terms(training, meta, last, cotangent),
    )


def weighted(params, batch, leaves):
    errors = (params["w"] - batch).square() + params["w"].sin()
    return leaves["weights"].exp() @ errors * (1 + leaves["l2"] * params["w"].square().sum())


@pytest.mark.parametrize("count", [None, 2, 4])
def test_with_what_the_loss_was_given_its_leaves_have_a_derivative_too(count, generator):
    training, params = Training(functional.plain(weighted), Momentum(), {"w": Dense()}), {"w": torch.ones(4)}
    trains = training if count is None else Tasks(training, count)
    leaves = {"weights": torch.randn(4, generator=generator), "l2": 0.1}
    meta, shape = training.init_meta(params, lr=0.01, loss=leaves), (4,) if count is None else (count, 4)
    batches = [torch.randn(shape, generator=generator) for _ in range(2)]
    carry, _ = trains.step(meta, trains.init(params), batches[0])
    last = Last(carry, trains.evaluate(meta, carry, batches[1]), (), Given(meta.loss, batches[1]))
    cotangent = {"w": torch.randn(shape, generator=generator)}
    pulled = by_autograd(trains, meta, last, cotangent)
    assert_near(closed_form(trains, meta, last, cotangent), pulled, rtol=1e-12)
    for name, leaf in tree.named(meta.loss, "loss").items():
        way = torch.randn(leaf.shape, generator=generator)

        def at(step, name=name, leaf=leaf, way=way):
            other = tree.replace(meta, {name: leaf + step * way})
            return trains.step(other, carry, batches[1])[0].params["w"].flatten() @ cotangent["w"].flatten()

        assert_near(tree.dot(tree.named(pulled)[name], way), (at(1e-5) - at(-1e-5)) / 2e-5, rtol=1e-8)


@pytest.mark.parametrize("hypergradient", [closed_form, by_autograd])
def test_online_learns_leaves_of_the_loss_by_either(hypergradient):
    training, params = Training(functional.plain(weighted), SGD()), {"w": torch.ones(4)}
    meta = training.init_meta(params, lr=0.01, loss={"weights": torch.zeros(4), "l2": 0.1})
    online = Online(
        training, SGD(), learn=("loss",), credit="gradient", hypergradient=hypergradient, guards=()
    )
    outer_meta, state = (
        online.init_meta(meta, lr=0.1),
        online.init(meta, training.init(params), torch.ones(4)),
    )
    state, _ = online.step(outer_meta, state, 2 * torch.ones(4))
    before = training.evaluate(meta, training.init(params), 2 * torch.ones(4))
    after = training.evaluate(meta, state.carry, torch.ones(4))
    last = Last(training.init(params), before, (), Given(meta.loss, 2 * torch.ones(4)))
    expected = tree.map(
        lambda x, d: x - 0.1 * d, meta.loss, closed_form(training, meta, last, after.grads).loss
    )
    state, _ = online.step(outer_meta, state, torch.ones(4))
    assert_near(state.meta.loss, expected, rtol=1e-12)
    assert not torch.equal(state.meta.loss["weights"], meta.loss["weights"])
