"""Guards on hypergradients and bounds on meta: what each does to the numbers, and what they prevent."""

import math

import pytest
import torch
from himmelblau import descent, himmelblau, states
from problems import assert_near, mlp
from torch.func import vmap

from metafop import (
    SGD,
    Adam,
    Bounded,
    Dense,
    Last,
    LowRank,
    Meta,
    Online,
    Rescaled,
    Scalar,
    Seen,
    Training,
    functional,
    safeguards,
    tree,
)


def moment(generator, scale=1.0):
    """Return a hypergradient, the parameters now, the last step and what was seen, under plain descent."""
    problem = mlp(generator)
    loss = functional.plain(lambda params, batch: scale * problem.loss(params, {}, batch)[0])
    training = Training(loss, SGD(), {"0.weight": Dense()})
    meta = training.init_meta(problem.params, lr=0.1 / scale)
    carry = training.init(problem.params)
    last = Last(carry, training.evaluate(meta, carry, problem.batches[0]), ())
    now, _ = training.advance(meta, carry, last.seen)
    seen = training.evaluate(meta, now, problem.batches[1])
    grads = training.pullback(meta, last, seen.grads)
    return (
        meta,
        Meta(SGD().hyper(lr=0.0)._replace(lr=meta.hyper.lr * grads.hyper.lr), grads.precond),
        now.params,
        last,
        seen,
    )


def test_a_scale_free_hypergradient_does_not_change_with_the_scale_of_the_loss():
    free = [
        safeguards.scale_free(*moment(torch.Generator().manual_seed(0), scale)[1:])
        for scale in (1.0, 1e6, 1e-6)
    ]
    assert_near(free[1], free[0], 1e-9)
    assert_near(free[2], free[0], 1e-9)


def test_scale_free_the_learning_rate_descends_minus_the_cosine_between_two_gradients(generator):
    _, grads, now, last, seen = moment(generator)
    a, b = (torch.cat([g.flatten() for g in s.grads.values()]) for s in (last.seen, seen))
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=0)
    torch.testing.assert_close(safeguards.scale_free(grads, now, last, seen).hyper.lr, -cosine)


def test_scale_free_without_a_gradient_or_a_step_is_zero_and_not_nan(generator):
    _, grads, now, last, seen = moment(generator)
    still = Seen(seen.value, tree.zeros_like(seen.grads), seen.buffers)
    for free in (
        safeguards.scale_free(grads, now, last, still),
        safeguards.scale_free(grads, last.carry.params, last, seen),
    ):
        assert all((leaf == 0).all() for leaf in tree.leaves(free))


def test_scale_free_a_learning_rate_of_one_parameter_descends_as_its_scalar_preconditioner_does(generator):
    problem = mlp(generator)
    training = Training(problem.loss, SGD(), dict.fromkeys(problem.params, Scalar()))
    meta = training.init_meta(problem.params, lr=dict.fromkeys(problem.params, 0.1))
    carry = training.init(problem.params)
    last = Last(carry, training.evaluate(meta, carry, problem.batches[0]), ())
    now, _ = training.advance(meta, carry, last.seen)
    seen = training.evaluate(meta, now, problem.batches[1])
    pulled = training.pullback(meta, last, seen.grads)
    chained = Meta(pulled.hyper._replace(lr=tree.scale(pulled.hyper.lr, 0.1)), pulled.precond)
    free = safeguards.scale_free(chained, now.params, last, seen)
    assert_near(free.hyper.lr, free.precond, 1e-12)


def test_feedback_is_the_derivative_of_osgms_normalised_feedback():
    training, meta, carry = descent()
    seen = training.evaluate(meta, carry, None)
    after, _ = training.advance(meta, carry, seen)
    then = training.evaluate(meta, after, None)
    last = Last(carry, seen, ())
    grads = safeguards.feedback(training.pullback(meta, last, then.grads), after.params, last, then)

    def h(m):
        moved, _ = training.advance(Meta(meta.hyper, {"x": m}), carry, seen)
        size = sum(g.square().sum() for g in seen.grads.values())
        return (himmelblau(moved.params, None) - himmelblau(carry.params, None)) / size

    torch.testing.assert_close(grads.precond["x"], torch.func.grad(h)(meta.precond["x"]), rtol=1e-12, atol=0)


def test_clip_shortens_what_is_long_and_leaves_what_is_short(generator):
    _, grads, now, last, seen = moment(generator)
    size = tree.norm(grads).item()
    short = safeguards.clip(0.5 * size)(grads, now, last, seen)
    torch.testing.assert_close(tree.norm(short).item(), 0.5 * size)
    assert_near(short, tree.scale(grads, 0.5), 1e-14)
    assert_near(safeguards.clip(2 * size)(grads, now, last, seen), grads, 0.0)


def test_clip_looks_only_at_what_is_learned():
    training, meta, carry = descent()
    clipped = Online(training, SGD(), credit="gradient", guards=(safeguards.clip(1e-3),))
    moved = states(clipped, SGD().hyper(lr=1.0), meta, carry, [None, None])[-1].meta.precond["x"] - torch.eye(
        2
    )
    torch.testing.assert_close(torch.linalg.vector_norm(moved).item(), 1e-3)


def test_bound_norm_keeps_every_matrix_within_its_limit():
    training, meta, carry = descent()
    online = Online(training, SGD(), bounds=(safeguards.bound_norm(1.5),))
    norms = [
        torch.linalg.vector_norm(state.meta.precond["x"]).item()
        for state in states(online, SGD().hyper(lr=0.1), meta, carry, [None] * 50)
    ]
    assert max(norms) <= 1.5 * (1 + 1e-12)
    assert norms[-1] == pytest.approx(1.5)


LIMITED = {
    "bound_norm": safeguards.bound_norm,
    "clip": safeguards.clip,
    "Bounded": lambda limit: Bounded(Dense(), limit),
    "Rescaled": lambda limit: Rescaled(Dense(), limit),
}


@pytest.mark.parametrize(
    "limit", [0, 0.0, -0.0, -1.5, -math.inf, math.nan, math.inf, False, True, "1"], ids=repr
)
@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_that_is_no_finite_number_above_zero_is_refused(name, limit):
    sentence = rf"{name} takes a finite limit above zero, got (limit=)?{limit!r}\. Pass .+\.$"
    with pytest.raises(ValueError, match=sentence):
        LIMITED[name](limit)


def test_rescaled_ends_at_its_limit_and_converges_where_the_limit_is_below_one_over_l():
    training, meta, carry = descent(start=(3.2, 2.2), lr=1.0, family=Rescaled(Dense(), limit=0.01))
    meta = Meta(meta.hyper, {"x": meta.precond["x"]._replace(inner=0.1 * meta.precond["x"].inner)})
    online = Online(training, SGD())
    ends = states(online, SGD().hyper(lr=1e-3), meta, carry, [None] * 500)
    family, last = Rescaled(Dense(), limit=0.01), ends[-1].meta.precond["x"]
    assert last.time == 500
    torch.testing.assert_close(family.norm(last).item(), 0.01, rtol=1e-3, atol=0)
    assert himmelblau(ends[-1].params, None) < 1e-6


@pytest.mark.parametrize("learn", [("precond.x.inner",), ("lr",), ("precond", "lr")], ids=str)
def test_time_passes_whatever_is_learned_and_nothing_else_moves_it(learn):
    family = Rescaled(Rescaled(Dense(), limit=3.0), limit=2.0)
    training, meta, carry = descent(family=family)
    online = Online(training, Adam(), learn, bounds=(safeguards.bound_norm(0.5),))
    hyper = Adam().hyper(lr=0.01, weight_decay=0.5)
    last = states(online, hyper, meta, carry, [None] * 5)[-1].meta.precond["x"]
    assert last.time == last.inner.time == 5  # it starts at 1, and the first step is not learned from


def test_a_bound_moves_only_what_is_learned():
    training, meta, carry = descent()
    online = Online(training, SGD(), ("lr",), bounds=(safeguards.bound_norm(0.1),))
    last = states(online, SGD().hyper(lr=0.1), meta, carry, [None] * 5)[-1]
    assert torch.equal(last.meta.precond["x"], torch.eye(2))


def test_a_null_step_comes_back_from_where_the_loss_is_not_finite():
    loss = functional.plain(lambda params, batch: (params["w"] - 3 * params["w"].log()).sum())
    training, params = Training(loss, SGD(), {"w": Dense()}), {"w": torch.full((4,), 4.0)}
    meta = training.init_meta(params, lr=20.0)
    online = Online(training, Adam(), ("precond", "lr"), null_step=True)
    ends = states(online, Adam().hyper(lr=0.05), meta, training.init(params), [None] * 60)
    torch.testing.assert_close(ends[-1].params["w"], torch.full((4,), 3.0), rtol=0.05, atol=0)


def test_a_null_step_takes_the_last_step_again_with_what_was_learned_from_it():
    training, meta, carry = descent(start=(0.0, 4.0), lr=0.02)
    online = Online(training, SGD(), credit="gradient", null_step=True)
    outer_meta, state = online.init_meta(meta, lr=0.1), online.init(meta, carry)
    rose = 0
    for _ in range(100):
        before = state
        state, info = online.step(outer_meta, state, None)
        if info["rose"]:
            rose += 1
            retaken, _ = training.advance(state.meta, before.last_carry, before.last_seen)
            assert_near(state.params, retaken.params, 0.0)
            assert_near(state.last_seen.value, before.last_seen.value, 0.0)
    assert rose > 0
    assert himmelblau(state.params, None) < 1e-6


def test_the_default_guard_brings_every_start_home_where_the_bare_rule_fails():
    starts = 10 * torch.rand(60, 2, generator=torch.Generator().manual_seed(3)) - 5
    training, meta, _ = descent()

    def failures(guards):
        online = Online(training, SGD(), guards=guards)
        outer_meta = online.init_meta(meta, lr=0.1)
        state = vmap(lambda start: online.init(meta, training.init({"x": start})))(starts)
        reached = torch.zeros(len(starts), dtype=torch.bool)
        step = vmap(lambda state: online.step(outer_meta, state, None))
        for _ in range(400):
            state, info = step(state)
            reached |= info["value"] < 1e-6
        return (~reached).sum().item()

    assert failures((safeguards.scale_free,)) == 0
    assert failures(()) > 5


def test_low_rank_and_scalar_stay_finite_under_every_guard_with_zero_gradients():
    dead = functional.plain(lambda params, batch: 0.0 * params["w"].sum())
    for family in (LowRank(2), Scalar()):
        for guard in (safeguards.scale_free, safeguards.feedback, safeguards.clip(1.0)):
            training = Training(dead, Adam(), {"w": family})
            params = {"w": torch.ones(3, 4)}
            meta = training.init_meta(params, torch.Generator().manual_seed(0), lr=0.1)
            online = Online(training, Adam(), ("precond", "lr"), guards=(guard,))
            assert tree.all_finite(
                states(online, Adam().hyper(lr=0.1), meta, training.init(params), [None] * 4)[-1]
            )
