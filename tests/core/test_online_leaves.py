"""Leaves of the loss that are learned while training: by the derivative of one step, level by level."""

from typing import Any

import torch
from leaves import FORMS, unrolled
from problems import OPTIMIZERS, assert_near, assert_same_bits, attention, convnet, every, mlp, slope
from torch.nn.functional import softplus

from metafop import SGD, Adam, Dense, LowRank, Online, Training, functional, safeguards, tree
from metafop.hypergradients import Adjoint, Forward, adjoint, autograd
from metafop.optimizers import Positive, Unit


def learner(problem, learn=("loss", "lr"), validated=True, lr=1e-3, **settings):
    """Return a learner without guards, its outer meta, its state, and what its steps are given."""
    settings = {"credit": "gradient", "guards": ()} | settings
    validation, pairs = None, problem.batches
    if validated:
        validation, pairs = problem.problem.loss, list(zip(pairs, problem.problem.batches, strict=False))
    online = Online(problem.training, SGD(), learn, validation=validation, **settings)
    outer_meta = online.init_meta(problem.meta, lr=lr)
    return online, outer_meta, online.init(problem.meta, problem.carry, pairs[0]), pairs


def stepped(online, outer_meta, state, pairs) -> Any:
    for pair in pairs:
        state, _ = online.step(outer_meta, state, pair)
    return state


@every("form", FORMS)
@every("setting", {k: OPTIMIZERS[k] for k in ("sgd, decayed", "nesterov, decayed", "adam, decayed")})
def test_it_moves_by_the_hypergradient_of_an_unroll_of_one_step(setting, form, generator):
    problem = unrolled(mlp, form, setting, generator, LowRank(2))
    online, outer_meta, state, pairs = learner(problem, ("loss", "lr", "precond"))
    state = stepped(online, outer_meta, state, pairs[:2])
    moved, info = online.step(outer_meta, state, pairs[2])

    def validation(carry):
        return problem.problem.loss(carry.params, carry.buffers, pairs[2][1])[0]

    # The last step took its gradient with the leaves of before, and then moved with what was just learned.
    given = state.meta._replace(loss=state.given.leaves)
    expected = adjoint(problem.training, validation, given, state.last_carry, [pairs[1][0]]).grads
    expected = online.learned.of(online.learned.chained(state.meta, expected))
    change = {k: online.learned.of(moved.meta)[k] - x for k, x in online.learned.of(state.meta).items()}
    change["hyper.lr"] = torch.log(moved.meta.hyper.lr / state.meta.hyper.lr)
    assert info["moved"]
    assert_near(tree.scale(change, -1e3), expected, rtol=1e-9, size=1e-2)


@every("validated", {"validated": True, "not": False})
def test_it_moves_by_the_finite_difference_of_a_step(validated, generator):
    problem = unrolled(convnet, FORMS["weights"], OPTIMIZERS["heavy ball"], generator)
    online, outer_meta, state, pairs = learner(problem, ("loss",), validated)
    first, _ = online.step(outer_meta, state, pairs[0])
    moved, _ = online.step(outer_meta, first, pairs[1])
    own, (inputs, labels) = problem.batches[0], pairs[1][1] if validated else problem.batches[1][:2]

    def value(leaves):
        after, _ = problem.training.step(problem.meta._replace(loss=leaves), problem.carry, own)
        if validated:
            return problem.problem.loss(after.params, after.buffers, (inputs, labels))[0]
        # By the loss of training, with the leaves held.
        return problem.training.loss(after.params, after.buffers, problem.batches[1], problem.meta.loss)[0]

    change, h = (moved.meta.loss - first.meta.loss) / -1e-3, 1e-5
    differences = [
        (value(problem.meta.loss + h * one) - value(problem.meta.loss - h * one)) / (2 * h)
        for one in torch.eye(len(change))
    ]
    assert_near(change, torch.stack(differences), rtol=1e-7)


@every("validated", {"validated": True, "not": False})
@every("setting", {k: OPTIMIZERS[k] for k in ("heavy ball, decayed", "adam, short")})
def test_a_tower_learns_by_the_finite_difference_of_the_step_below(setting, validated, generator):
    problem = unrolled(mlp, FORMS["nested"], setting, generator, Dense())
    settings = {"credit": "velocity", "guards": (safeguards.scale_free,)}
    online, outer_meta, state, pairs = learner(problem, validated=validated, lr=0.1, **settings)
    tower = Online(online, SGD(), ("lr",), guards=())
    top = tower.init_meta(outer_meta, lr=1.0)
    state = stepped(tower, top, tower.init(outer_meta, state), pairs[:3])
    moved, info = tower.step(top, state, pairs[3])
    assert info["moved"]
    assert info["below.moved"]

    def value(log_lr):
        below = state.meta._replace(hyper=state.meta.hyper._replace(lr=log_lr.exp()))
        after, _ = online.step(below, state.last_carry, pairs[2])
        if validated:
            return problem.problem.loss(after.params, after.buffers, pairs[3][1])[0]
        return problem.training.loss(after.params, after.buffers, pairs[3], state.carry.meta.loss)[0]

    here, h = state.meta.hyper.lr.log(), 1e-4
    change = here - moved.meta.hyper.lr.log()
    assert_near(change, (value(here + h) - value(here - h)) / (2 * h), rtol=1e-6)


@every("validated", {"validated": True, "not": False})
@every("estimator", {"autograd": autograd, "adjoint": adjoint, "forward": Forward(("lr",))})
def test_a_learner_of_leaves_is_differentiated_like_any_training(estimator, validated, generator):
    problem = unrolled(mlp, FORMS["nested"], OPTIMIZERS["heavy ball"], generator)
    online, outer_meta, state, pairs = learner(problem, validated=validated, lr=0.1)
    window = (online, lambda state: problem.outer_loss(state.carry), outer_meta, state, pairs)
    estimate = estimator(*window)
    assert_near(estimate.grads.hyper.lr, slope(window), rtol=1e-6)
    assert [note for note in estimate.info["notes"] if "Zeros stand" not in note] == []


@every("make", {"batch norm": convnet, "layer norm, attention": attention})
@every("estimator", {"autograd": autograd, "adjoint": adjoint, "over forward": Adjoint(over="forward")})
def test_what_a_learner_of_leaves_learns_is_differentiated_through_norms(estimator, make, generator):
    """Where the last step started has an effect through what is learned from it: a third derivative."""
    problem = unrolled(make, FORMS["inputs"], OPTIMIZERS["heavy ball"], generator)
    online, outer_meta, state, (first, *batches) = learner(problem, ("loss",), validated=False, lr=1.0)
    state, _ = online.step(outer_meta, state, first)
    along = tree.map(lambda p: torch.randn(p.shape, generator=generator), state.last_carry.params)

    def outer_loss(state):
        return problem.outer_loss(state.carry)

    def value(h):
        params = tree.map(lambda p, v: p + h * v, state.last_carry.params, along)
        moved = state._replace(last_carry=state.last_carry._replace(params=params))
        return outer_loss(stepped(online, outer_meta, moved, batches))

    estimate = estimator(online, outer_loss, outer_meta, state, batches)
    products = tree.map(tree.dot, estimate.start.last_carry.params, along)
    assert_near(sum(products.values()), (value(1e-5) - value(-1e-5)) / 2e-5, rtol=1e-6)
    assert estimate.info["notes"] == ()


def test_what_is_not_finite_teaches_nothing_about_leaves(generator):
    problem = unrolled(mlp, FORMS["weights"], OPTIMIZERS["heavy ball"], generator)
    online, outer_meta, state, pairs = learner(problem, ("loss",))
    broken = tree.map(lambda x: x * torch.nan if x.is_floating_point() else x, pairs[1])
    moves = []
    for pair in (pairs[0], broken, pairs[1], pairs[2]):
        before = state
        state, info = online.step(outer_meta, state, pair)
        moves.append(bool(info["moved"]))
        if not info["moved"]:
            assert_same_bits(state.meta, before.meta)
    assert moves == [False, False, False, True]
    assert tree.all_finite(state.meta)


def noisy_and_clean(generator):
    """Return logistic regression on 40 examples, of which the first 20 have wrong labels, and 20 others."""
    inputs = torch.randn(60, 3, generator=generator)
    labels = (inputs @ torch.tensor([2.0, -1.0, 0.5]) > 0).double()
    wrong = torch.cat([1 - labels[:20], labels[20:40]])

    def each(params, inputs, labels):
        return softplus(inputs @ params["w"]) - labels * (inputs @ params["w"])

    weighted = functional.plain(lambda params, batch, leaves: (leaves * each(params, *batch)).mean())
    clean = functional.plain(lambda params, batch: each(params, *batch).mean())
    return weighted, clean, ((inputs[:40], wrong), (inputs[40:], labels[40:]))


DOMAINS = {"free": {}, "positive": {"*": Positive()}, "unit": {"*": Unit()}}


@every("domains", DOMAINS)
def test_wrong_labels_lose_their_weight_within_its_range(domains, generator):
    weighted, clean, pair = noisy_and_clean(generator)
    params = {"w": torch.zeros(3)}
    training = Training(weighted, SGD(), loss_domains=domains)
    meta = training.init_meta(params, lr=0.5, loss=torch.full((40,), 0.5))
    online = Online(training, Adam(), ("loss",), validation=clean)
    outer_meta, state = online.init_meta(meta, lr=0.1), online.init(meta, training.init(params), pair)
    for _ in range(100):
        state, _ = online.step(outer_meta, state, pair)
    weights = state.meta.loss
    assert weights[:20].mean() < 0.3 * weights[20:].mean()
    assert bool((weights < 0).any()) == (not domains)
    assert bool((weights >= 1).any()) == ("*" not in domains or domains["*"] == Positive())


def test_torch_compile_follows_a_step_that_learns_leaves(generator):
    weighted, clean, pair = noisy_and_clean(generator)
    params = {"w": torch.zeros(3)}
    training = Training(weighted, SGD(), loss_domains={"*": Unit()})
    meta = training.init_meta(params, lr=0.5, loss=torch.full((40,), 0.5))
    online = Online(training, SGD(), ("loss", "lr"), validation=clean)
    outer_meta, state = online.init_meta(meta, lr=0.05), online.init(meta, training.init(params), pair)
    torch.compiler.reset()  # it gives up on code that other tests had it build often
    compiled, expected = torch.compile(online.step, fullgraph=True), state
    for _ in range(3):
        state, _ = compiled(outer_meta, state, pair)
        expected, _ = online.step(outer_meta, expected, pair)
    assert_near(state, expected, rtol=1e-10, size=1.0)
