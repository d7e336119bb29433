"""Schedules: torch's, constant ones, their derivatives entry by entry, and what is refused."""

from typing import Any, cast

import pytest
import torch
from problems import OPTIMIZERS, assert_near, assert_pure, assert_same_bits, every, mlp
from torch.func import jvp, vmap
from torch.optim.lr_scheduler import LambdaLR

from metafop import SGD, Adam, Dense, Meta, Momentum, Online, Training, functional, tree, verify
from metafop.hypergradients import adjoint, autograd
from metafop.hypergradients.reversible import reversible
from metafop.optimizers import Scheduled, ScheduledState
from metafop.optimizers.hyper import fitted
from metafop.optimizers.reversible import ReversibleMomentum
from metafop.protocols import Estimator

FACTORS = [1.0, 0.5, 2.0, 0.1]
KINDS = {k: OPTIMIZERS[k] for k in ("sgd, decayed", "heavy ball", "nesterov, decayed", "adam, short")}


def scheduled(setting, steps, schedules=None, fields=None):
    """Return the optimizer with every field scheduled, or those named, and its hyper."""
    optimizer = Scheduled(setting.optimizer, steps, fields or setting.hyper()._fields)
    return optimizer, optimizer.hyper(**(setting.values | (schedules or {})))


def trained(problem, optimizer, hyper):
    training = problem.training(optimizer)
    meta, carry = (
        training.init_meta(problem.params, **hyper._asdict()),
        training.init(problem.params, problem.buffers),
    )
    for batch in problem.batches:
        carry, _ = training.step(meta, carry, batch)
    return carry


def by_torch(problem, groups, rates):
    """Return the parameters after training with torch, each group's lr times a factor for each step."""
    leaves = {k: p.clone().requires_grad_() for k, p in problem.params.items()}
    optimizer = groups(leaves)
    plan = LambdaLR(optimizer, [lambda t, r=r: r[min(t, len(r) - 1)] for r in rates])
    for batch in problem.batches:
        optimizer.zero_grad()
        problem.loss(leaves, {}, batch)[0].backward()
        optimizer.step()
        plan.step()
    return {k: p.detach() for k, p in leaves.items()}


@pytest.mark.parametrize("steps", [2, 7])
@every("setting", OPTIMIZERS)
def test_a_constant_schedule_is_the_plain_optimizer_bit_for_bit(setting, steps, generator):
    problem = mlp(generator)
    ours, plain = (
        trained(problem, *scheduled(setting, steps)),
        trained(problem, setting.optimizer, setting.hyper()),
    )
    assert_same_bits(ours.params, plain.params)
    assert_same_bits(ours.opt.inner, plain.opt)
    assert ours.opt.time == len(problem.batches)


@every("setting", OPTIMIZERS)
def test_a_schedule_is_torchs_and_its_last_entry_is_held(setting, generator):
    problem = mlp(generator)
    rates = [setting.values["lr"] * f for f in FACTORS]
    ours = trained(problem, *scheduled(setting, len(FACTORS), {"lr": rates})).params
    theirs = by_torch(problem, lambda p: setting.twin(p.values()), [FACTORS])
    assert_near(ours, theirs, rtol=1e-12)


@every("setting", KINDS)
def test_a_schedule_per_parameter_is_torchs_by_group(setting, generator):
    problem = mlp(generator)
    factors = {k: [1.0 / (1 + i + t) for t in range(4)] for i, k in enumerate(problem.params)}
    rates = {k: setting.values["lr"] * torch.tensor(f) for k, f in factors.items()}
    ours = trained(problem, *scheduled(setting, 4, {"lr": rates}, fields=("lr",))).params
    theirs = by_torch(
        problem, lambda p: setting.twin([{"params": [x]} for x in p.values()]), list(factors.values())
    )
    assert_near(ours, theirs, rtol=1e-12)


@every("setting", KINDS)
def test_the_pullback_is_the_derivative_by_autograd_and_by_differences(setting):
    optimizer, hyper = scheduled(setting, 4)
    assert verify.check(optimizer, **hyper._asdict()).ok
    held, hyper = scheduled(setting, 2)  # the third step has the last of two entries
    assert verify.check(held, parts=("hyper",), **hyper._asdict()).ok


def unrolled(problem, optimizer, hyper, estimator: Estimator = adjoint, family=None):
    """Return the derivative of the last batch's loss after a step on each of the others."""
    training = problem.training(optimizer, family)
    meta, carry = (
        training.init_meta(problem.params, **hyper._asdict()),
        training.init(problem.params, problem.buffers),
    )
    outer = lambda carry: training.evaluate(meta, carry, problem.batches[-1]).value  # noqa: E731
    return estimator(training, outer, meta, carry, problem.batches[:-1])


@every("setting", KINDS)
def test_over_many_steps_the_adjoint_is_autograd(setting, generator):
    problem = mlp(generator)
    optimizer, hyper = scheduled(setting, 3)
    swept = unrolled(problem, optimizer, hyper, adjoint, Dense()).grads
    assert_near(swept, unrolled(problem, optimizer, hyper, autograd, Dense()).grads, rtol=1e-10)


@every("setting", KINDS)
def test_derivatives_over_time_add_up_to_that_of_a_constant(setting, generator):
    problem = mlp(generator)
    apart = unrolled(problem, *scheduled(setting, 4)).grads.hyper
    whole = unrolled(problem, setting.optimizer, setting.hyper()).grads.hyper
    assert_near(tree.map(torch.sum, apart), whole, rtol=1e-10)


def test_each_entry_has_the_derivative_of_a_central_difference(generator):
    problem, setting, h = mlp(generator), OPTIMIZERS["nesterov, decayed"], 1e-5
    optimizer, hyper = scheduled(setting, 4, {"lr": [0.1, 0.05, 0.2, 0.1], "momentum": [0.5, 0.9, 0.3, 0.6]})
    grads = unrolled(problem, optimizer, hyper).grads.hyper
    for name in ("lr", "momentum"):
        for t in range(4):
            way = torch.zeros(4).index_fill(0, torch.tensor(t), h)
            ends = [
                unrolled(problem, optimizer, hyper._replace(**{name: getattr(hyper, name) + s * way})).value
                for s in (1, -1)
            ]
            assert_near(getattr(grads, name)[t], (ends[0] - ends[1]) / (2 * h), rtol=1e-7)


def test_entries_after_the_horizon_have_no_derivative(generator):
    grads = unrolled(mlp(generator), *scheduled(OPTIMIZERS["adam, short"], 6)).grads.hyper
    assert torch.equal(grads.lr[4:], torch.zeros(2))
    assert (grads.lr[:4] != 0).all()


@every("setting", OPTIMIZERS)
def test_an_online_learner_takes_a_constant_schedule_for_the_plain_optimizer(setting, generator):
    problem, ends = mlp(generator), []
    for optimizer, hyper in ((setting.optimizer, setting.hyper()), scheduled(setting, 3)):
        training = problem.training(optimizer, Dense())
        meta = training.init_meta(problem.params, **hyper._asdict())
        online = Online(training, Adam())
        outer_meta, state = (
            online.init_meta(meta, lr=0.01),
            online.init(meta, training.init(problem.params)),
        )
        for batch in problem.batches:
            state, _ = online.step(outer_meta, state, batch)
        ends.append(state)
    assert_same_bits(ends[1].params, ends[0].params)
    assert_same_bits(ends[1].meta.precond, ends[0].meta.precond)
    # What P is credited with is what the last step did, with its entry.
    assert ends[1].memory.time == ends[1].last_carry.opt.time


def test_what_can_be_undone_can_be_undone_with_a_schedule(generator):
    problem, optimizer = mlp(generator), Scheduled(ReversibleMomentum(), 3, ("lr", "momentum"))
    hyper = optimizer.hyper(lr=[0.1, 0.05, 0.2], momentum=[0.5, 0.9, 0.3])
    swept = unrolled(problem, optimizer, hyper, adjoint, Dense())
    undone = unrolled(problem, optimizer, hyper, reversible, Dense())
    assert_same_bits(undone[:3], swept[:3])


def test_schedules_nest(generator):
    problem, both = mlp(generator), Scheduled(SGD(), 3, ("lr", "weight_decay"))
    outer = Scheduled(Scheduled(SGD(), 2), 3, ("weight_decay",))
    nested = outer.hyper(lr=[0.1, 0.3], weight_decay=[0.2, 0.1, 0.3])
    flat = both.hyper(lr=[0.1, 0.3, 0.3], weight_decay=[0.2, 0.1, 0.3])
    ours, flat = trained(problem, outer, nested), trained(problem, both, flat)
    assert_same_bits(ours.params, flat.params)


def stepped(hyper, time):
    """Return what two steps from `time` on make of a parameter, for schedules of lr and momentum."""
    optimizer, params = Scheduled(Momentum(), 3, ("lr", "momentum")), {"w": torch.ones(2)}
    opt = ScheduledState(time, {"w": torch.ones(2)})
    for _ in range(2):
        params, opt = optimizer.update(hyper, params, opt, params)
    return params["w"]


def ball(lr=(0.1, 0.2, 0.4), momentum=(0.9, 0.5, 0.1)):
    return Scheduled(Momentum(), 3, ("lr", "momentum")).hyper(lr=lr, momentum=momentum)


def test_vmap_over_schedules_and_over_times_is_a_loop():
    hypers, times = [ball(), ball(lr=(0.3, 0.2, 0.1))], torch.tensor([0.0, 1.0, 5.0])
    for hyper in hypers:
        together = vmap(stepped, (None, 0))(hyper, times)
        assert_same_bits(together, torch.stack([stepped(hyper, t) for t in times]))
    together = vmap(stepped, (0, None))(tree.stack(hypers), times[1])
    assert_same_bits(together, torch.stack([stepped(hyper, times[1]) for hyper in hypers]))


def test_forward_derivatives_are_the_backward_ones(generator):
    hyper, time = ball(), torch.tensor(1.0)
    way = tree.map(lambda x: torch.randn(x.shape, generator=generator), hyper)
    cotangent = torch.randn(2, generator=generator)
    ahead = jvp(lambda hyper: stepped(hyper, time), (hyper,), (way,))[1]
    back = tree.pull(lambda hyper: stepped(hyper, time), hyper, cotangent)
    along = sum(tree.dot(w.reshape(-1), b.reshape(-1)) for w, b in zip(way, back, strict=True))
    torch.testing.assert_close(tree.dot(cotangent, ahead), along, rtol=1e-12, atol=0)


def test_a_compiled_step_serves_every_time():
    torch.compiler.reset()  # it gives up on code that other tests had it build often
    step = torch.compile(stepped, fullgraph=True, backend="aot_eager")
    for time in torch.arange(4.0):
        assert_near(step(ball(), time), stepped(ball(), time), rtol=1e-15)


def test_updates_and_credits_are_pure():
    optimizer, params = Scheduled(Momentum(), 3, ("lr", "momentum")), {"w": torch.ones(2)}
    _, opt = optimizer.update(ball(), params, optimizer.init(params), params)
    assert_pure(optimizer.update, ball(), params, opt, params)
    assert_pure(optimizer.pullback, ball(), params, opt, params, params)
    assert_pure(optimizer.credit, ball(), optimizer.init_memory(params), params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parameters_and_state_stay_in_their_precision(dtype):
    optimizer, params = Scheduled(Momentum(), 3, ("lr", "momentum")), {"w": torch.ones(2, dtype=dtype)}
    hyper, opt = fitted(optimizer, ball()._asdict(), params), optimizer.init(params)
    after, state = optimizer.update(hyper, params, opt, params)
    assert (after["w"].dtype, state.inner["w"].dtype) == (dtype, dtype)
    assert state.time.dtype == hyper.lr.dtype == torch.float32


rolling = Training(
    functional.plain(lambda params, batch: params["w"].sum()), Scheduled(Momentum(), 3, ("lr", "momentum"))
)


def started(hyper):
    params = {"w": torch.ones(2)}
    return rolling.init_meta(params, **hyper._asdict()), rolling.init(params)


REFUSED = {
    "a class": (lambda: Scheduled(cast(Any, SGD), 3), ["class SGD", "SGD()"]),
    "no such field": (lambda: Scheduled(SGD(), 3, ("momentum",)), ["SGD()", "('momentum',)", "'lr'"]),
    "a string": (lambda: Scheduled(SGD(), 3, cast(Any, "lr")), ["SGD()", "'lr'", "tuple", "('lr',)"]),
    "a schedule of a schedule": (
        lambda: Scheduled(Scheduled(SGD(), 3), 3, ("lr",)),
        ["Scheduled", "['weight_decay']", "('lr',)"],
    ),
    "a name that is not known": (
        lambda: Scheduled(SGD(), 3).hyper(momentum=0.9),
        ["SGD()", "lr, weight_decay", "momentum", "Momentum()"],
    ),
    "no lr": (lambda: Scheduled(SGD(), 3).hyper(), ["SGD()", "needs a value for lr", "Pass lr=..."]),
    "too few entries": (
        lambda: Scheduled(SGD(), 3).hyper(lr=[0.1, 0.2]),
        ["3 entries", "lr", "(2,)", "steps=2"],
    ),
    "too few for one": (
        lambda: Scheduled(SGD(), 3).hyper(lr={"w": [0.1, 0.2]}),
        ["3 entries", "lr['w']", "(2,)"],
    ),
    "not scheduled": (
        lambda: Scheduled(SGD(), 1).hyper(lr=0.1, weight_decay=[0.1]),
        ["SGD()", "weight_decay", "[0.1]", "Scheduled"],
    ),
    "a negative entry": (
        lambda: Scheduled(SGD(), 3).hyper(lr=[0.1, -0.2, 0.3]),
        ["lr[1]", "-0.2", "zero or more"],
    ),
    "a negative entry for one": (
        lambda: Scheduled(SGD(), 2).hyper(lr={"w": [0.1, -0.2]}),
        ["lr['w'][1]", "-0.2"],
    ),
    "not a number": (
        lambda: Scheduled(SGD(), 2).hyper(lr=[0.1, float("nan")]),
        ["lr[1]", "nan"],
    ),
    "an empty schedule": (
        lambda: started(ball()._replace(lr=torch.ones(0))),
        ["Scheduled", "lr", "(0,)", "3 entries"],
    ),
    "other lengths": (
        lambda: started(ball()._replace(lr=torch.ones(2))),
        ["Scheduled", "lr", "3 entries", "(2,)"],
    ),
    "a matrix": (lambda: started(ball()._replace(lr=torch.ones(3, 2))), ["lr", "(3, 2)"]),
    "a schedule for a plain optimizer": (
        lambda: SGD().hyper(lr=torch.ones(3)),
        ["SGD()", "lr", "(3,)", "Scheduled"],
    ),
    "undoing what cannot be undone": (
        lambda: reversible(rolling, lambda carry: carry.params["w"].sum(), *started(ball()), [None]),
        ["Scheduled", "cannot be undone", "Momentum(nesterov=False)", "ReversibleMomentum()", "adjoint"],
    ),
    "learned from the boundary": (
        lambda: Online(rolling, SGD(), ("momentum",)).init(*started(ball(momentum=(0.5, 0.0, 0.5)))),
        ["Online", "hyper.momentum[1]", "0", "boundary", "Start inside"],
    ),
}


@every("act, words", REFUSED)
def test_bad_schedules_get_a_clear_sentence(act, words):
    with pytest.raises((ValueError, TypeError)) as caught:
        act()
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message
    assert len(message) < 400


def test_a_hypergradient_moves_each_entry_by_its_own_name(generator):
    problem = mlp(generator)
    training = problem.training(Scheduled(SGD(), 3))
    meta = training.init_meta(problem.params, lr=0.1)
    assert isinstance(meta, Meta)
    assert set(tree.named(meta)) == {"hyper.lr", "hyper.weight_decay"}
    online = Online(training, SGD(), ("lr",), guards=())
    outer_meta, state = (
        online.init_meta(meta, lr=0.1),
        online.init(meta, training.init(problem.params)),
    )
    for batch in problem.batches[:2]:  # the second step learns from the first, which used the first entry
        state, _ = online.step(outer_meta, state, batch)
    assert state.meta.hyper.lr[0] != 0.1
    assert torch.equal(state.meta.hyper.lr[1:], meta.hyper.lr[1:])


@pytest.mark.parametrize(
    "value", [True, [True, False, True], None, "0.1", ["0.1"] * 3, 1j, [[0.1], 0.2, 0.3]], ids=repr
)
def test_a_schedule_of_anything_but_numbers_is_refused(value):
    with pytest.raises(TypeError, match=r"takes numbers for lr, got .+ Pass a number"):
        Scheduled(SGD(), 3).hyper(lr=value)


@pytest.mark.parametrize("steps", [0, -1, True, 2.0, None, "3"], ids=repr)
def test_a_number_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(ValueError, match=r"takes one step or more, got steps=.+ Pass the number of entries"):
        Scheduled(SGD(), steps)
