"""Momentum that can be undone: every bit comes back, and so do the derivatives that `adjoint` finds."""

import gc
from itertools import count
from typing import Any

import pytest
import torch
from problems import FAMILIES, MODELS, assert_near, assert_same_bits, convnet, every, mlp, moved
from torch.func import jvp, vjp, vmap

from metafop import SGD, Adam, Meta, Momentum, Online, Training, functional, tree
from metafop.hypergradients import adjoint, autograd
from metafop.hypergradients.reversible import reversible
from metafop.optimizers import ReversibleMomentum, Scheduled

BALL = ReversibleMomentum()
VALUES = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
SELECTION = {k: FAMILIES[k] for k in ("identity", "dense", "kronecker", "rescaled spatial")}
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)}


def unrolled(problem, family, steps, generator, optimizer: Any = BALL):
    """Return what an estimator is called with; the outer loss is that of a batch, in training mode."""
    training = problem.training(optimizer, family)
    meta = training.init_meta(problem.params, generator, **VALUES)
    meta = Meta(meta.hyper, moved(meta.precond, generator))

    def outer_loss(carry):
        return problem.loss(carry.params, carry.buffers, problem.batches[4])[0]

    batches = [problem.batches[t % 4] for t in range(steps)]
    return training, outer_loss, meta, training.init(problem.params, problem.buffers), batches


def assert_same_estimate(actual, expected):
    assert_same_bits(actual[:3], expected[:3])
    assert actual.info["notes"] == expected.info["notes"]
    for key in ("values", "cotangents", "overflow"):
        assert_same_bits(actual.info[key], expected.info[key])


def valley(params, batch):
    """A loss that is not quadratic."""
    return (1 + (params["w"] - batch).square()).sqrt().sum()


def small(steps, optimizer=BALL, **values) -> Any:
    """Return what an estimator is called with, for a problem of three numbers."""
    params, training = {"w": torch.tensor([1.0, -2.0, 0.1])}, Training(functional.plain(valley), optimizer)
    meta = training.init_meta(params, None, **(VALUES | values))
    batches = torch.linspace(-1, 1, steps).tolist()
    return training, lambda carry: carry.params["w"].square().sum(), meta, training.init(params), batches


@every("make", MODELS)
@every("family", SELECTION)
def test_every_bit_is_that_of_adjoint(family, make, generator):
    problem = unrolled(make(generator), family, 8, generator)
    assert_same_estimate(reversible(*problem), adjoint(*problem))


def test_every_bit_is_that_of_adjoint_in_float32(generator):
    problem = mlp(generator)
    torch.set_default_dtype(torch.float32)
    params = {k: p.float() for k, p in problem.params.items()}
    batches = [(inputs.float(), labels) for inputs, labels in problem.batches]
    problem = unrolled(type(problem)(problem.model, problem.loss, params, {}, batches), None, 8, generator)
    estimate = reversible(*problem)
    assert estimate.grads.hyper.lr.dtype == torch.float32
    assert any(rest.any() for rest in estimate.carry.opt.rest.values())
    assert_same_estimate(estimate, adjoint(*problem))


def test_a_second_window_starts_where_the_first_ended(generator):
    training, outer_loss, meta, carry, batches = unrolled(convnet(generator), None, 5, generator)
    carry = reversible(training, outer_loss, meta, carry, batches).carry
    second = training, outer_loss, meta, carry, batches
    assert_same_estimate(reversible(*second), adjoint(*second))


@pytest.mark.parametrize("steps", [1, 10, 50])
@every("family", {k: SELECTION[k] for k in ("identity", "kronecker")})
def test_the_derivative_is_that_of_momentum(family, steps, generator):
    problem, state = mlp(generator), generator.get_state()
    ours = reversible(*unrolled(problem, family, steps, generator))
    theirs = adjoint(*unrolled(problem, family, steps, generator.set_state(state), Momentum()))
    assert_near(ours[:2], theirs[:2], rtol=1e-8)
    assert_near(ours.carry.params, theirs.carry.params, rtol=1e-8)
    assert_near(ours.info["cotangents"], theirs.info["cotangents"], rtol=1e-8)


def test_the_derivative_is_that_of_the_whole_graph(generator):
    problem = unrolled(convnet(generator), FAMILIES["low rank"], 6, generator)
    assert_near(reversible(*problem)[:2], autograd(*problem)[:2], rtol=1e-11)


def walked(hyper, params, directions):
    """Return where the steps lead, and the stores that each emptied."""
    opt, saved = BALL.init(params), []
    for direction in directions:
        saved.append(BALL.emptied(hyper, opt))
        params, opt = BALL.update(hyper, params, opt, direction(params))
    return params, opt, saved


def assert_comes_back(hyper, start, directions):
    """Undo the steps, and return how many stores they emptied."""
    params, opt, saved = walked(hyper, start, directions)
    for direction, emptied in zip(reversed(directions), reversed(saved), strict=True):
        params, half = BALL.before(hyper, params, opt)
        opt = BALL.undo(hyper, params, half, direction(params), emptied)
    assert_same_bits((params, opt), (start, BALL.init(start)))
    return sum(map(len, saved))


def springs(generator, dtype, steps):
    """Return parameters that lie on the grid, and forces toward other places at every step."""
    stiffness, places = torch.randn(6, generator=generator).exp(), torch.randn(97, 6, generator=generator)

    def force(t):
        return lambda params: {"w": (stiffness * (params["w"] - places[t % 97])).to(dtype)}

    return {"w": torch.tensor([0.5, -1.5, 3.0, 0.0, -0.25, 2.0], dtype=dtype)}, list(map(force, range(steps)))


def test_ten_thousand_steps_come_back_to_every_bit_of_their_start(generator):
    words = assert_comes_back(BALL.hyper(**VALUES), *springs(generator, torch.float64, 10_000))
    assert 20 < words < 30


@pytest.mark.parametrize("momentum", [0.002, 0.5, 0.917, 0.999])
@every("dtype", DTYPES)
def test_every_decay_and_precision_comes_back(dtype, momentum, generator):
    assert_comes_back(BALL.hyper(**(VALUES | {"momentum": momentum})), *springs(generator, dtype, 150))


def test_a_thousand_steps_take_a_fifth_of_a_bit_each():
    estimate = reversible(*small(1000))
    assert estimate.info["store_bits"] == 3 * 64 * 3
    assert estimate.info["bits_per_parameter_step"] <= 0.2


def test_words_that_are_full_are_put_back():
    problem = small(150, momentum=0.5)
    estimate = reversible(*problem)
    assert estimate.info["store_bits"] == 3 * 64 * 3
    assert_same_estimate(estimate, adjoint(*problem))


def test_a_schedule_is_undone_entry_by_entry():
    scheduled = Scheduled(BALL, 120, ("lr", "momentum"))
    training, outer_loss, _, carry, batches = small(120)
    training = Training(training.loss, scheduled)
    schedules = {"lr": torch.linspace(0.1, 0.01, 120), "momentum": torch.linspace(0.3, 0.95, 120)}
    hyper = scheduled.hyper(**schedules)
    problem = (
        training,
        outer_loss,
        training.init_meta(carry.params, **hyper._asdict()),
        training.init(carry.params),
        batches,
    )
    estimate = reversible(*problem)
    assert estimate.info["store_bits"] > 64 * 3
    assert_same_estimate(estimate, adjoint(*problem))


def held(estimator, steps):
    """Return the bytes of new tensors, but for single numbers, that are alive when the end is reached."""
    training, outer_loss, meta, carry, batches = small(steps)
    sizes = []

    def tensors():
        return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]

    def watching(carry):
        alive = [x for x in tensors() if id(x) not in before and x.dim()]
        sizes.append(sum(x.nbytes for x in alive))
        return outer_loss(carry)

    gc.collect()
    before = {id(x): x for x in tensors()}
    estimator(training, watching, meta, carry, batches)
    return sizes[0]


def test_no_more_is_held_for_more_steps():
    assert held(reversible, 40) == held(reversible, 10)
    assert held(adjoint, 40) > held(adjoint, 10)


def stepped(generator, dtype=torch.float64):
    """Return parameters and a state after some steps, and a direction."""
    params, directions = springs(generator, dtype, 4)
    params, opt, _ = walked(BALL.hyper(**VALUES), params, directions[:3])
    return params, opt, directions[3](params)


def test_a_step_has_the_derivatives_of_momentum(generator):
    params, opt, direction = stepped(generator)

    def ours(hyper, params, velocity, direction):
        new, state = BALL.update(hyper, params, opt._replace(velocity=velocity), direction)
        return new, state.velocity

    at = BALL.hyper(**VALUES), params, opt.velocity, direction
    cotangent, ways = moved((params, params), generator), moved(at, generator)
    assert_near(vjp(ours, *at)[1](cotangent), vjp(Momentum().update, *at)[1](cotangent), rtol=1e-10)
    assert_near(jvp(ours, at, ways), jvp(Momentum().update, at, ways), rtol=1e-10)


def test_the_pullback_and_the_credit_are_those_of_momentum(generator):
    (params, opt, direction), ball, hyper = stepped(generator), Momentum(), BALL.hyper(**VALUES)
    last = direction, moved(params, generator)
    ours, theirs = (hyper, params, opt, *last), (hyper, params, opt.velocity, *last)
    assert_near(BALL.pullback(*ours), ball.pullback(*theirs), rtol=1e-10)
    assert_near(BALL.toward(*ours), ball.toward(*theirs), rtol=1e-14)
    assert_near(BALL.credit(hyper, *last), ball.credit(hyper, *last), rtol=1e-14)


def test_a_decay_is_rounded_and_so_are_its_derivatives(generator):
    params, opt, direction = stepped(generator)
    between, near = BALL.hyper(lr=0.1, momentum=0.9137), BALL.hyper(lr=0.1, momentum=0.914)
    assert_same_bits(BALL.update(between, params, opt, direction), BALL.update(near, params, opt, direction))
    assert_same_bits(*(BALL.pullback(x, params, opt, direction, direction) for x in (between, near)))
    assert_same_bits(*(BALL.credit(x, direction, direction) for x in (between, near)))


@pytest.mark.parametrize("field", ["lr", "momentum", "weight_decay"])
@every("dtype", {k: DTYPES[k] for k in ("torch.float64", "torch.float32")})
def test_vmap_over_a_hyperparameter_is_a_loop_bit_for_bit(dtype, field, generator):
    params, directions = springs(generator, dtype, 60)

    def trained(value):
        hyper, now, opt = BALL.hyper(**(VALUES | {field: value})), params, BALL.init(params)
        for direction in directions:
            now, opt = BALL.update(hyper, now, opt, direction(now))
        return now, opt

    values = VALUES[field] * torch.tensor([0.1, 0.5, 1.05])
    assert_same_bits(vmap(trained)(values), tree.stack([trained(value) for value in values]))


def test_a_compiled_step_is_the_step(generator):
    params, opt, direction = stepped(generator, torch.float32)
    hyper = BALL.hyper(lr=0.05, momentum=0.9)
    compiled = torch.compile(BALL.update, fullgraph=True)(hyper, params, opt, direction)
    assert_same_bits(compiled, BALL.update(hyper, params, opt, direction))


def test_online_learns_it_and_adjoint_goes_through(generator):
    training, outer_loss, meta, carry, batches = unrolled(mlp(generator), FAMILIES["dense"], 4, generator)
    online = Online(training, SGD(), learn=("precond", "lr", "momentum"))
    problem = online, outer_loss, online.init_meta(meta, lr=0.01), online.init(meta, carry), batches
    assert_near(adjoint(*problem)[:2], autograd(*problem)[:2], rtol=1e-10)


def test_what_cannot_be_undone_is_refused():
    training, *rest = small(2)
    online = Online(training, SGD(), learn=("lr",))
    for other in (Training(training.loss, Adam()), Training(training.loss, Momentum()), online):
        with pytest.raises(TypeError, match=r"needs .*, got (Adam|Momentum|Online).* Use adjoint"):
            reversible(other, *rest)


def test_a_transform_is_refused():
    training, outer_loss, meta, carry, batches = small(2)

    def estimated(lr):
        return reversible(training, outer_loss, Meta(BALL.hyper(lr=lr), meta.precond), carry, batches).value

    with pytest.raises(TypeError, match=r"inside vmap, grad or another transform"):
        vmap(estimated)(torch.tensor([0.1, 0.2]))


def test_what_leaves_the_exact_range_is_not_a_number_and_said():
    estimate = reversible(*small(5, lr=1e4, weight_decay=0.0))
    assert all(leaf.isnan().all() for leaf in tree.leaves(estimate.grads))
    assert (
        f"the loss of step {int(estimate.info['overflow'])} of 5 is not finite" in estimate.info["notes"][0]
    )
    wide = small(5, ReversibleMomentum(bits=30), lr=1e4, weight_decay=0.0)
    assert_same_estimate(reversible(*wide), adjoint(*wide))


def test_a_gradient_that_depends_on_buffers_is_refused():
    def loss(params, buffers, batch):
        return valley(params, batch) / buffers["time"], {"time": buffers["time"] + 1}

    _, outer_loss, meta, carry, batches = small(4)
    carry = carry._replace(buffers={"time": torch.ones(())})
    with pytest.raises(ArithmeticError, match=r"without coming back to the start: .* depends on buffers"):
        reversible(Training(loss, BALL), outer_loss, meta, carry, batches)


def test_a_gradient_that_is_another_each_time_is_refused():
    (_, *rest), calls = small(4), count(1)
    changing = functional.plain(lambda params, batch: valley(params, batch) / next(calls))
    with pytest.raises(ArithmeticError, match="loss of step 3 comes out different"):
        reversible(Training(changing, BALL), *rest)


@pytest.mark.parametrize("fields", [{"bits": 0}, {"bits": 52}, {"denominator": 1}])
def test_fields_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match=r"ReversibleMomentum takes .*, got .*\. Pass"):
        ReversibleMomentum(**fields)


@pytest.mark.parametrize("momentum", [0.0, {"w": 0.9, "b": 0.0}])
def test_no_decay_at_all_is_refused(momentum):
    with pytest.raises(ValueError, match=r"takes a momentum above 0, got 0"):
        BALL.hyper(lr=0.1, momentum=momentum)
