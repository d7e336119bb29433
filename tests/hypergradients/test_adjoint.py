"""Hypergradients through many steps, from carries alone, are those of the whole graph."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from memory import peak_of_tensors
from problems import (
    ALL_MODELS,
    FAMILIES,
    OPTIMIZERS,
    assert_near,
    assert_same_bits,
    convnet,
    every,
    lstm,
    mlp,
    moved,
)
from torch import nn

from metafop import SGD, Adam, Carry, Dense, Last, LowRank, Meta, Momentum, Online, Training, functional, tree
from metafop.hypergradients import Adjoint, Truncated, adjoint, autograd, closed_form, forward
from metafop.hypergradients.channels_last import channels_last, takes_channels_last
from metafop.hypergradients.checkpointing import Checkpointing

FOUR = {k: OPTIMIZERS[k] for k in ("sgd, decayed", "heavy ball, decayed", "nesterov, decayed", "adam, short")}
KEEPS = {
    "all": Adjoint("all"),
    "sqrt": Adjoint("sqrt"),
    "log": Adjoint("log"),
    "forward over reverse": Adjoint(over="forward"),
}


class Viewed(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1)


def unrolled(make, setting, family, generator, steps=4):
    """Return what an estimator takes: a training, an outer loss on a batch of its own, meta, …"""
    problem = make(generator)
    training = problem.training(setting.optimizer, family)
    meta = training.init_meta(problem.params, generator, **setting.hyper()._asdict())
    meta = Meta(meta.hyper, moved(meta.precond, generator))
    *batches, last = problem.batches
    carry = training.init(problem.params, problem.buffers)

    def outer_loss(carry):
        return problem.loss(carry.params, carry.buffers, last)[0]

    return training, outer_loss, meta, carry, list(itertools.islice(itertools.cycle(batches), steps))


def terms(problem, steps=4):
    """Return Σ_t ‖λ_t‖ ‖Δθ_t‖, the size of the terms that a hypergradient adds up: they may cancel."""
    training, _, meta, carry, batches = problem
    sizes, total = adjoint(*problem).info["cotangents"], 0.0
    for t, batch in enumerate(batches):
        after, _ = training.step(meta, carry, batch)
        total += sizes[t + 1] * tree.norm({k: after.params[k] - p for k, p in carry.params.items()})
        carry = after
    return total


def assert_same_estimate(actual, expected, rtol=1e-10, size=0.0):
    assert_near(actual.grads, expected.grads, rtol, size)
    assert_near(actual.value, expected.value, rtol)
    assert_near(actual.carry, expected.carry, rtol)


@every("make", ALL_MODELS)
@every("family", FAMILIES)
@every("setting", FOUR)
def test_the_adjoint_is_the_derivative_through_the_whole_graph(setting, family, make, generator):
    problem = unrolled(make, setting, family, generator)
    assert_same_estimate(adjoint(*problem), autograd(*problem), size=terms(problem))


@every("estimator", KEEPS)
@every("make", ALL_MODELS)
@every("setting", OPTIMIZERS)
def test_whatever_is_kept_and_however_it_is_differentiated(setting, make, estimator, generator):
    problem = unrolled(make, setting, LowRank(2), generator, steps=9)
    assert_same_estimate(estimator(*problem), autograd(*problem), size=terms(problem))


@every("setting", OPTIMIZERS)
def test_what_is_kept_changes_no_bit(setting, generator):
    problem = unrolled(convnet, setting, Dense(), generator, steps=20)
    whole = adjoint(*problem)
    for frugal in (Adjoint("sqrt"), Adjoint("log"), Adjoint(memory=6 * tree.size(problem[3]))):
        assert_same_bits(frugal(*problem), whole)


@every("make", ALL_MODELS)
@every("setting", OPTIMIZERS)
def test_through_one_step_it_is_the_online_rule(setting, make, generator):
    problem = training, outer_loss, meta, carry, batches = unrolled(make, setting, LowRank(2), generator, 1)
    seen = training.evaluate(meta, carry, batches[0])
    after, _ = training.advance(meta, carry, seen)
    next_grads = torch.func.grad(lambda params: outer_loss(Carry(params, after.opt, after.buffers)))(
        after.params
    )
    online = closed_form(training, meta, Last(carry, seen, ()), next_grads)
    assert_near(adjoint(*problem).grads, online, rtol=1e-12, size=terms(problem))


@pytest.mark.parametrize("order", ["exact", "paper"])
def test_an_online_learner_is_differentiated_like_any_training(order, generator):
    training, outer_loss, meta, carry, batches = unrolled(
        convnet, OPTIMIZERS["heavy ball"], LowRank(2), generator, steps=6
    )
    online = Online(training, Adam(), ("precond", "lr"), order=order)
    outer_meta, state = online.init_meta(meta, lr=0.01), online.init(meta, carry)
    problem = (online, lambda state: outer_loss(state.carry), outer_meta, state, batches)
    expected = autograd(*problem)
    assert expected.grads.hyper.lr.abs() > 1e-4
    for estimator in KEEPS.values():
        assert_near(estimator(*problem).grads, expected.grads, rtol=1e-10, size=1e-3)


def test_a_training_that_looks_at_the_value_of_its_loss_is_differentiated_through_it(generator):
    class Polyak(Training):
        """Steps of lr (value / ‖g‖²): a carry depends on the value of the loss, too."""

        def advance(self, meta, carry, seen):
            square = sum(g.square().sum() for g in seen.grads.values())
            scaled = seen._replace(grads=tree.scale(seen.grads, seen.value / square))
            return super().advance(meta, carry, scaled)

    plain, outer_loss, meta, carry, batches = unrolled(mlp, OPTIMIZERS["sgd"], None, generator)
    problem = (Polyak(plain.loss, plain.optimizer), outer_loss, meta, carry, batches)
    for estimator in KEEPS.values():
        assert_same_estimate(estimator(*problem), autograd(*problem))


def test_what_cannot_be_differentiated_forward_is_done_in_reverse_and_said(generator):
    torch.set_default_dtype(torch.float32)  # in which torch's LSTM is one fused layer
    problem = unrolled(lstm, OPTIMIZERS["heavy ball"], None, generator)
    fallen, expected = Adjoint(over="forward")(*problem), adjoint(*problem)
    assert_same_bits(fallen.grads, expected.grads)
    assert "reverse over reverse" in fallen.info["notes"][0]
    assert expected.info["notes"] == ()


def test_it_is_the_derivative_of_finite_differences(generator):
    training, outer_loss, meta, carry, batches = unrolled(
        mlp, OPTIMIZERS["adam, short"], Dense(), generator, steps=12
    )
    grads = tree.named(adjoint(training, outer_loss, meta, carry, batches).grads)

    def value(name, x):
        return adjoint(training, outer_loss, tree.replace(meta, {name: x}), carry, batches).value

    for name, leaf in tree.named(meta).items():
        way, h = torch.randn(leaf.shape, generator=generator), 1e-6
        difference = (value(name, leaf + h * way) - value(name, leaf - h * way)) / (2 * h)
        torch.testing.assert_close(tree.dot(way, grads[name]), difference, rtol=1e-6, atol=1e-8)


def test_what_is_compiled_serves_every_step_and_changes_nothing_but_rounding(generator):
    problem = training, outer_loss, meta, carry, batches = unrolled(
        convnet, OPTIMIZERS["heavy ball"], LowRank(2), generator, steps=5
    )
    short = tree.map(lambda x: x[:3], batches[2])
    problem = (training, outer_loss, meta, carry, [*batches[:2], short, *batches[3:]])
    estimate = Adjoint("sqrt", compile=True)(*problem)
    assert_same_estimate(estimate, autograd(*problem), size=terms(problem))

    def doubled(params, buffers, batch):
        value, buffers = training.loss(params, buffers, batch)
        return 2 * value, buffers

    other = (Training(doubled, training.optimizer, training.preconditioners), *problem[1:])
    estimate = Adjoint(compile=True)(*other)  # of the same shapes, but not what was compiled before
    assert_same_estimate(estimate, autograd(*other), size=terms(other))


@pytest.mark.parametrize(
    ("shape", "takes"), [(nn.Flatten(), True), (Viewed(), False)], ids=["flatten", "view"]
)
def test_images_are_turned_channels_last_for_models_that_take_them_so(shape, takes, generator):
    images = torch.randn(4, 2, 5, 5, generator=generator)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), shape, nn.Linear(27, 1))
    loss, params, _ = functional.from_module(model, lambda model, batch: model(batch["images"]).mean())
    training, batch = Training(loss, Momentum()), {"images": images, "scale": torch.ones(())}
    meta, carry = training.init_meta(params, lr=0.1), training.init(params)
    assert takes_channels_last(training, meta, carry, batch) is takes
    turned, scale = channels_last([images, torch.ones(())])
    assert turned.is_contiguous(memory_format=torch.channels_last)
    assert_same_bits((turned, scale), (images, torch.ones(())))


def test_a_root_of_the_carries_is_held_at_once_all_told():
    loss = functional.plain(lambda params, batch: params["w"].square().sum())
    training, params = Training(loss, Momentum()), {"w": torch.ones(50_000)}
    meta, carry = training.init_meta(params, lr=0.01), training.init(params)

    def peak(steps):
        given = training, lambda carry: carry.params["w"].sum(), meta, carry, steps * [torch.zeros(())]
        return peak_of_tensors(lambda: Adjoint("sqrt")(*given)) / tree.size(carry)

    assert 16 < peak(100) < 20.1
    assert 42 < peak(900) < 48  # √(2T) carries, and what one step back needs


def test_what_was_compiled_for_one_tensor_twice_is_not_used_for_two():
    """λ of a and b are one tensor at first, lr and batch are."""
    loss = functional.plain(
        lambda params, batch: (params["a"] * batch[0] - batch[1]).square().sum() + params["b"].cos().sum()
    )
    training, lr = Training(loss, Momentum()), torch.tensor(0.1)
    params = {"a": torch.linspace(0, 1, 3), "b": torch.ones(3)}
    meta = training.init_meta(params, lr={"a": lr, "b": lr})
    x, y = torch.ones(3), torch.linspace(1, 2, 3)
    call = (lambda carry: (carry.params["a"] + carry.params["b"]).sin().sum(), meta, training.init(params))
    for batches in ([(x, x)] * 3, [(x, y)] * 3):
        compiled, expected = (e(training, *call, batches) for e in (Adjoint(compile=True), autograd))
        assert_same_estimate(compiled, expected)
    apart = tree.replace(meta, {"hyper.lr.a": torch.tensor(0.2)})
    call = (call[0], apart, call[2], [(x, y)] * 3)
    assert_same_estimate(Adjoint(compile=True)(training, *call), autograd(training, *call))


def test_what_was_compiled_for_one_form_is_not_used_for_another():
    """Strides of parameters and batches change, those of λ do after the first step back, and so do types."""
    loss = functional.plain(lambda params, batch: (batch["x"] @ params["w"]).tanh().square().mean())
    training = Training(loss, Momentum())
    w, x = torch.linspace(-1, 1, 12).reshape(4, 3), torch.linspace(0, 1, 20).reshape(5, 4)
    for params, batches in (
        ({"w": w}, [{"x": x, "none": None}] * 3),
        ({"w": w.T.contiguous().T}, [{"x": x, "none": None}, {"x": x.T.contiguous().T, "none": None}]),
        ({"w": w.float()}, [{"x": x.float(), "none": None}] * 3),
    ):
        meta = training.init_meta(params, lr=0.1)
        call = (lambda carry: carry.params["w"].sum(), meta, training.init(params), batches)
        rtol = 1e-10 if params["w"].dtype == torch.float64 else 1e-5
        assert_same_estimate(Adjoint(compile=True)(training, *call), autograd(training, *call), rtol)


def test_a_loss_that_reads_values_is_not_compiled():
    loss = functional.plain(lambda params, batch: params["w"].sum() * (2 if params["w"].sum() > 0 else 1))
    training, params = Training(loss, Momentum()), {"w": torch.ones(2)}
    meta, carry = training.init_meta(params, lr=0.1), training.init(params)
    with pytest.raises(RuntimeError, match=r"reads the values .* Use torch.where"):
        Adjoint(compile=True)(training, lambda carry: carry.params["w"].sum(), meta, carry, [None])


def test_a_transform_cannot_see_into_what_is_compiled():
    training, outer_loss, meta, carry = quadratic(lr=0.1)

    def value(lr):
        return Adjoint(compile=True)(
            training, outer_loss, Meta(meta.hyper._replace(lr=lr), meta.precond), carry, [None]
        )

    with pytest.raises(TypeError, match=r"inside vmap.* compile=False"):
        torch.func.vmap(value)(torch.ones(2))


def test_compiled_batches_must_be_tensors(generator):
    training, outer_loss, meta, carry, batches = unrolled(mlp, OPTIMIZERS["sgd"], None, generator)
    with pytest.raises(TypeError, match=r"takes batches of tensors, got 0\.5 in that of step 0\. Wrap it"):
        Adjoint(compile=True)(training, outer_loss, meta, carry, [(*batch, 0.5) for batch in batches])


def test_the_same_call_gives_the_same_bits_and_changes_nothing(generator):
    problem = unrolled(convnet, OPTIMIZERS["adam"], LowRank(2), generator)
    before = tree.copy(problem[2:4])
    assert_same_bits(adjoint(*problem), adjoint(*problem))
    assert_same_bits(problem[2:4], before)


def test_info_tells_the_loss_of_each_step_and_how_the_cotangent_grows(generator):
    problem = training, outer_loss, meta, carry, batches = unrolled(
        mlp, OPTIMIZERS["heavy ball"], None, generator, steps=7
    )
    info = Adjoint("log")(*problem).info
    values = []
    for batch in batches:
        carry, step = training.step(meta, carry, batch)
        values.append(step["value"])
    assert_same_bits(info["values"], torch.stack(values))
    assert info["cotangents"].shape == (8,)
    outer = torch.func.grad(lambda params: outer_loss(Carry(params, carry.opt, carry.buffers)))(carry.params)
    torch.testing.assert_close(info["cotangents"][-1], tree.norm(outer))
    assert info["overflow"] == -1
    assert info["notes"] == ()


def evaluated(make, generator, eval_mode):
    """Return an unroll of a net with batch norm whose outer loss is in eval mode, or in training mode."""
    problem = make(generator)
    training = problem.training(Momentum())
    outer, _, _ = functional.from_module(
        problem.model.train(not eval_mode),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
    meta = training.init_meta(problem.params, lr=0.1)
    carry = training.init(problem.params, problem.buffers)
    *batches, last = problem.batches
    return training, lambda carry: outer(carry.params, carry.buffers, last)[0], meta, carry, batches


@pytest.mark.parametrize(
    "estimator", [autograd, adjoint, Truncated(2)], ids=["autograd", "adjoint", "truncated"]
)
def test_an_outer_loss_in_eval_mode_says_what_is_missed(estimator, generator):
    notes = estimator(*evaluated(convnet, generator, eval_mode=True)).info["notes"]
    assert "depends on the buffers (1.running_mean, 1.running_var)" in notes[0]
    assert "is missed" in notes[0]
    assert estimator(*evaluated(convnet, generator, eval_mode=False)).info["notes"] == ()


@pytest.mark.parametrize("estimator", [autograd, adjoint], ids=["autograd", "adjoint"])
def test_a_gradient_that_reads_buffers_is_said_to_miss_something(estimator):
    def loss(params, buffers, batch):
        mean = 0.9 * buffers["mean"] + 0.1 * params["w"].detach()
        return (params["w"] - buffers["mean"]).square().sum() + params["w"].sum(), {"mean": mean}

    training, params = Training(loss, Momentum()), {"w": torch.ones(2)}
    meta, carry = (
        training.init_meta(params, lr=0.1),
        training.init(params, {"mean": torch.zeros(2)}),
    )
    notes = estimator(training, lambda carry: carry.params["w"].sum(), meta, carry, 3 * [None]).info["notes"]
    assert "The gradient depends on the buffers (mean)" in notes[0]


def test_buffers_are_known_by_name_whatever_their_order():
    def loss(params, buffers, batch):
        return params["w"].square().sum(), {"b": buffers["b"] + 1, "a": buffers["a"]}

    training, params = Training(loss, Momentum()), {"w": torch.ones(2)}
    meta = training.init_meta(params, lr=0.1)
    carry = training.init(params, {"a": torch.zeros(()), "b": torch.zeros(())})
    after = adjoint(training, lambda carry: carry.params["w"].sum(), meta, carry, 3 * [None]).carry
    assert after.buffers == {"a": 0, "b": 3}
    fewer = Training(lambda params, buffers, batch: (params["w"].sum(), {}), Momentum())
    with pytest.raises(ValueError, match=r"returns the buffers that it was given, \['a', 'b'\], got \[\]"):
        fewer.evaluate(meta, carry, None)


def test_adam_through_zero_gradients_gives_numbers(generator):
    inputs = torch.rand(64, 20, generator=generator)
    inputs[:, ::3] = 0.0  # dead pixels: their weights have a gradient of exactly zero, always
    labels = torch.randint(3, (64,), generator=generator)
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3)).to(torch.float32)
    loss, params, _ = functional.from_module(
        model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
    )
    training = Training(loss, Adam(), {"0.weight": Dense()})
    meta, batch = training.init_meta(params, lr=1e-2), (inputs.float(), labels)
    estimate = Adjoint("sqrt")(
        training, lambda carry: loss(carry.params, {}, batch)[0], meta, training.init(params), 200 * [batch]
    )
    assert bool(tree.all_finite((estimate.value, estimate.grads, estimate.carry)))
    assert estimate.grads.hyper.lr != 0


def quadratic(lr, momentum=0.9, curvature=1.0):
    """Return an unroll on a quadratic, of which the lr may be too large."""
    loss = functional.plain(lambda params, batch: curvature * params["w"].square().sum() / 2)
    training, params = Training(loss, Momentum()), {"w": torch.ones(3)}
    meta = training.init_meta(params, lr=lr, momentum=momentum)
    return training, lambda carry: carry.params["w"].sum(), meta, training.init(params)


@pytest.mark.parametrize("estimator", [autograd, adjoint, Adjoint("log")], ids=["autograd", "adjoint", "log"])
def test_a_training_that_overflows_is_reported_with_its_step(estimator):
    info = estimator(*quadratic(lr=1e20), 100 * [None]).info
    step = int(info["overflow"])
    assert 0 < step < 100
    assert not info["values"][step].isfinite()
    assert info["values"][:step].isfinite().all()
    assert f"step {step} of 100" in info["notes"][0]


@pytest.mark.parametrize("estimator", [autograd, adjoint, forward], ids=["autograd", "adjoint", "forward"])
def test_parameters_that_overflow_in_the_last_step_are_reported_though_the_outer_loss_is_finite(estimator):
    training = Training(functional.plain(lambda params, x: (params["w"] * x).square().sum()), SGD())
    params = {"w": torch.ones(2)}
    meta, carry = training.init_meta(params, lr=1e300), training.init(params)
    batches = [torch.tensor(1e10)]
    info = estimator(training, lambda carry: carry.params["w"].tanh().sum(), meta, carry, batches).info
    assert info["overflow"] == 1
    assert "parameters after all 1 steps are not finite" in info["notes"][0]


def test_a_hypergradient_that_overflows_is_reported_with_its_step():
    training, outer_loss, meta, carry = quadratic(lr=1e4)
    still = Carry(tree.zeros_like(carry.params), carry.opt, carry.buffers)  # at rest: the loss stays zero
    info = adjoint(training, outer_loss, meta, still, 100 * [None]).info
    step = int(info["overflow"])
    assert 0 < step < 100
    assert not info["cotangents"][step].isfinite()
    assert info["cotangents"][step + 1 :].isfinite().all()
    assert f"overflowed at step {step} of 100, going back" in info["notes"][0]


def test_the_whole_graph_reports_an_overflow_with_its_step_too():
    training, outer_loss, meta, carry = quadratic(lr=1e4)
    still = Carry(tree.zeros_like(carry.params), carry.opt, carry.buffers)
    call = (training, outer_loss, meta, still, 100 * [None])
    assert autograd(*call).info["notes"] == adjoint(*call).info["notes"] != ()


def test_windows_count_an_overflow_from_the_start():
    info = Truncated(2)(*quadratic(lr=1e20), 100 * [None]).info
    whole = adjoint(*quadratic(lr=1e20), 100 * [None]).info
    assert info["overflow"] == whole["overflow"]
    assert f"In the window from step {2 * (int(whole['overflow']) // 2)} on: " in info["notes"][0]


def test_large_cotangents_of_small_precision_are_no_overflow():
    torch.set_default_dtype(torch.float32)
    training, _, meta, carry = quadratic(lr=0.1)
    info = adjoint(training, lambda carry: 1e25 * carry.params["w"].sum(), meta, carry, 5 * [None]).info
    assert info["overflow"] == -1
    assert info["notes"] == ()


def test_tensors_that_require_a_gradient_leave_no_graph_behind():
    training, outer_loss, meta, carry = quadratic(lr=0.1)
    meta = tree.map(lambda x: x.clone().requires_grad_(), meta)
    for estimator in (autograd, adjoint):
        estimate = estimator(training, outer_loss, meta, carry, 3 * [None])
        assert not any(leaf.requires_grad for leaf in tree.leaves(estimate[:3]))


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_truncated_windows_hold_the_carry_that_they_start_from(steps, generator):
    problem = training, outer_loss, meta, carry, batches = unrolled(
        convnet, OPTIMIZERS["adam, short"], LowRank(2), generator, steps=7
    )
    estimate, values, grads = Truncated(steps)(*problem), [], []
    for start in range(0, 7, steps):
        part = autograd(training, outer_loss, meta, carry, batches[start : start + steps])
        values.append(part.value)
        grads.append(part.grads)
        carry = part.carry
    assert_near(estimate.value, torch.stack(values).mean(), rtol=1e-12)
    mean = tree.map(lambda *xs: torch.stack(xs).mean(0), *grads)
    assert_near(estimate.grads, mean, rtol=1e-10, size=1e-4)
    assert_same_bits(estimate.carry, carry)
    assert estimate.info["values"].shape == (7,)
    assert_same_bits(Truncated(steps, autograd)(*problem).value, estimate.value)


def test_a_loader_is_refused_and_a_lazy_sequence_is_not(generator):
    training, outer_loss, meta, carry, batches = unrolled(mlp, OPTIMIZERS["sgd"], None, generator)

    class Lazy:
        def __len__(self):
            return 4

        def __getitem__(self, t):
            return batches[t]

    lazy = adjoint(training, outer_loss, meta, carry, Lazy())
    assert_same_bits(lazy, adjoint(training, outer_loss, meta, carry, batches))
    with pytest.raises(TypeError, match=r"cannot be asked twice .* Pass a sequence"):
        adjoint(training, outer_loss, meta, carry, iter(batches))  # pyright: ignore[reportArgumentType]


def test_a_memory_budget_is_kept_or_refused():
    training, outer_loss, meta, carry = quadratic(lr=0.1)
    one, batches = tree.size(carry), 100 * [None]
    assert_same_bits(
        Adjoint(memory=8 * one)(training, outer_loss, meta, carry, batches),
        adjoint(training, outer_loss, meta, carry, batches),
    )
    for settings in (Adjoint(memory=3 * one), Adjoint("all", memory=50 * one)):
        with pytest.raises(ValueError, match=r"A horizon of 100 steps .* needs .* bytes .* Give more memory"):
            settings(training, outer_loss, meta, carry, batches)


@pytest.mark.parametrize(
    "settings", [{"keep": "some"}, {"memory": 0}, {"memory": 1.5}, {"over": "sideways"}], ids=str
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"Adjoint takes .* got .* Pass"):
        Adjoint(**settings)


def swept(schedule, steps, budget):
    """Return the most bytes held at any time, and the steps taken, by walking through the schedule."""
    waiting, stop, most, taken = [(0, budget)], steps, 0, 0
    while waiting:
        start, left = waiting[-1]
        held = schedule.carry * (len(waiting) - 1)  # the first is the caller's
        if distance := schedule.distance(stop - start, left):
            waiting.append((start + distance, left - schedule.carry))
            taken += distance
        else:
            kept = schedule.whole * (stop - start) - schedule.carry  # the first of them is held already
            most, taken = max(most, held + kept), taken + stop - start
            waiting.pop()
            stop = start
    return most, taken


@pytest.mark.parametrize(("carry", "whole"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("steps", [1, 2, 10, 50, 256])
def test_a_schedule_keeps_to_its_budget(carry, whole, steps):
    schedule = Checkpointing(carry, whole)
    for budget in range(carry * steps.bit_length(), whole * steps + 2, 3):
        most, taken = swept(schedule, steps, budget)
        assert most <= budget + whole - carry  # and what one step needs
        assert taken <= steps * schedule.passes(steps, budget)


def test_few_steps_are_taken_again():
    """Against the fewest, by dynamic programming over where to keep the next carry."""
    carry, whole = 2, 3

    @functools.cache
    def fewest(steps, budget):
        everything = [steps] if steps <= max((budget + carry) // whole, 1) else []
        splits = range(1, steps) if budget >= carry else []
        parts = [k + fewest(steps - k, budget - carry) + fewest(k, budget) for k in splits]
        return min(everything + parts, default=math.inf)

    for steps in range(1, 50):
        for budget in range(carry * steps.bit_length(), 40):
            assert swept(Checkpointing(carry, whole), steps, budget)[1] <= 1.1 * fewest(steps, budget)


@pytest.mark.parametrize("steps", [50, 256, 1000, 10_000])
def test_two_passes_take_a_root_of_carries_and_a_logarithm_few_passes(steps):
    schedule, root = Checkpointing(1, 1), math.ceil(math.sqrt(2 * steps))
    assert schedule.passes(steps, root - 1) == 2
    assert schedule.passes(steps, root - 3) == 3
    assert swept(schedule, steps, steps.bit_length())[1] < steps * steps.bit_length() / 2


@pytest.mark.parametrize("carries", [2, 100, 999])
def test_long_horizons_are_swept_within_any_budget(carries):
    training, outer_loss, meta, carry = quadratic(lr=0.1)
    steps = 1200 if carries > 2 else 3
    frugal = Adjoint(memory=carries * tree.size(carry))
    assert_same_bits(
        frugal(training, outer_loss, meta, carry, steps * [None]).grads,
        adjoint(training, outer_loss, meta, carry, steps * [None]).grads,
    )


@every("estimator", KEEPS | {"forward": forward})
def test_parameters_that_start_as_one_tensor_are_differentiated_apart(estimator):
    loss = functional.plain(lambda params, batch: (params["a"] * params["b"].square() - batch).square().sum())
    training, start = Training(loss, Momentum()), torch.tensor([0.5, 0.8])
    results = []
    for params in ({"a": start, "b": start}, {"a": start, "b": start.clone()}):
        meta = training.init_meta(params, lr=0.1, momentum=0.5)
        outer_loss = lambda carry: carry.params["a"].sum() + 2 * carry.params["b"].prod()  # noqa: E731
        results.append(estimator(training, outer_loss, meta, training.init(params), 3 * [torch.ones(2)]))
    assert_same_estimate(*results)
