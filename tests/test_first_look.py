"""A second derivative that is not that of the gradient is noted: stopped gradients, and torch's faults."""

import pytest
import torch
from problems import assert_near, convnet, every, lstm
from torch import nn
from torch.func import vmap
from torch.nn.utils.parametrizations import weight_norm

from metafop import Momentum, Training, functional
from metafop.hypergradients import Adjoint, Forward, adjoint, autograd, forward, reversible
from metafop.optimizers import ReversibleMomentum

REVERSE = {"adjoint": adjoint, "forward over reverse": Adjoint(over="forward"), "autograd": autograd}


def regression(loss, optimizer=None, dtype=torch.float64, steps=5, width=3):
    """An unroll of a linear model whose loss is `loss(prediction, target)`."""
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(12, n, generator=rng, dtype=dtype) for n in (4, width))
    optimizer = optimizer or Momentum()
    training = Training(functional.plain(lambda params, x: loss(x @ params["w"], y)), optimizer)
    params = {"w": torch.randn(4, width, generator=rng, dtype=dtype)}
    meta = training.meta(params, optimizer.hyper(lr=0.5, decay=0.5))
    return training, lambda carry: carry.params["w"].square().sum(), meta, training.init(params), steps * [x]


def from_model(model, steps=5):
    rng = torch.Generator().manual_seed(0)
    loss, params, buffers = functional.from_module(
        model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    )
    params = {k: 0.7 * torch.randn(p.shape, generator=rng) for k, p in params.items()}
    batch = torch.randn(6, 4, generator=rng), torch.randn(6, 3, generator=rng)
    training = Training(loss, Momentum())
    meta = training.meta(params, Momentum().hyper(lr=0.3, decay=0.5))
    return (
        training,
        lambda carry: torch.stack([p.square().sum() for p in carry.params.values()]).sum(),
        meta,
        training.init(params, buffers),
        steps * [batch],
    )


def slope(window, h=1e-5):
    """The derivative in lr, by central differences of whole runs."""
    training, outer_loss, meta, carry, batches = window

    def run(lr):
        now = carry
        for batch in batches:
            now, _ = training.step(meta._replace(hyper=meta.hyper._replace(lr=lr)), now, batch)
        return outer_loss(now)

    return (run(meta.hyper.lr + h) - run(meta.hyper.lr - h)) / (2 * h)


def detached(z, y):
    z = z.tanh()
    return ((z - y).square() * (1 + 5 * z.detach().softmax(0))).mean()


def without_grad(z, y):
    z = z.tanh()
    with torch.no_grad():
        weight = 1 + 5 * z.softmax(0)
    return ((z - y).square() * weight).mean()


def through_python(z, y):
    return (z.tanh() - y).square().mean() * (1 + float(z.square().mean()))


def straight_through(z, y):
    hard = z.round()
    return ((z + (hard - z).detach()).tanh() - y).square().mean()


class Wrong(torch.autograd.Function):
    """tanh with a second derivative that leaves out a factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return g * (1 - y.square() / 2 - y.square().detach() / 2)


STOPPED = {
    "detach": detached,
    "no_grad": without_grad,
    "item": through_python,
    "straight through": straight_through,
    "a wrong second derivative": lambda z, y: (Wrong.apply(z) - y).square().mean(),
}


@every("estimator", REVERSE)
@every("loss", STOPPED)
def test_what_is_left_out_of_a_second_derivative_is_noted(loss, estimator):
    window = regression(loss)
    estimate = estimator(*window)
    assert "the loss stops a gradient (detach, no_grad, item)" in " ".join(estimate.info["notes"])
    assert (estimate.grads.hyper.lr - slope(window)).abs() > 1e-3 * slope(window).abs()


@every("loss", {k: v for k, v in STOPPED.items() if k in ("detach", "no_grad", "item")})
def test_all_that_go_in_reverse_give_one_number(loss):
    window = regression(loss)
    expected = autograd(*window).grads
    for estimator in (adjoint, Adjoint("log"), Adjoint(over="forward")):
        assert_near(estimator(*window).grads, expected, 1e-10)


def test_forward_is_right_or_says_that_it_is_not():
    window = regression(without_grad)
    estimate = forward(*window)
    torch.testing.assert_close(estimate.grads.hyper.lr, slope(window), rtol=1e-6, atol=0)
    assert estimate.info["notes"] == ()
    assert "stops a gradient" in forward(*regression(detached)).info["notes"][0]


def test_reversible_notes_it_too():
    window = regression(detached, ReversibleMomentum())
    assert "stops a gradient" in reversible(*window).info["notes"][0]


SOUND = {
    "relu": lambda z, y: (z.relu() - y).square().mean(),
    "max": lambda z, y: (z - y).square().amax(1).mean() + z.tanh().sort(0).values[:3].sum(),
    "logsumexp": lambda z, y: (z.logsumexp(1) - y.sum(1)).square().mean(),
    "a stopped constant": lambda z, y: (z.tanh() - y.detach()).square().mean(),
    "linear": lambda z, y: (z * y).mean(),
    "tiny": lambda z, y: 1e-12 * (z.tanh() - y).square().mean(),
    "huge": lambda z, y: 1e12 * (z.tanh() - y).square().mean(),
}


@every("estimator", REVERSE | {"forward": forward})
@every("loss", SOUND)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_is_sound_is_not_noted(loss, dtype, estimator):
    window = regression(loss, dtype=dtype, width=40)
    assert not any("stops a gradient" in note for note in estimator(*window).info["notes"])


@every("loss", {"detach": detached, "no_grad": without_grad})
def test_single_precision_is_looked_at_in_double(loss):
    notes = adjoint(*regression(lambda z, y: loss(z.relu() - 0.1, y), dtype=torch.float32, width=40)).info[
        "notes"
    ]
    assert "stops a gradient" in notes[0]


def test_a_loss_that_closes_over_single_precision_is_looked_at_as_it_is():
    rng = torch.Generator().manual_seed(0)
    fixed = torch.randn(3, 3, generator=rng, dtype=torch.float32)
    window = regression(lambda z, y: detached(z @ fixed, y), dtype=torch.float32)
    assert "stops a gradient" in adjoint(*window).info["notes"][0]


def test_the_look_can_be_skipped_by_name():
    assert Adjoint(skip=("hessian",))(*regression(detached)).info["notes"] == ()


def test_a_training_is_looked_at_once():
    calls = []

    def loss(z, y):
        calls.append(1)
        return (z.tanh() - y).square().mean()

    window = regression(loss, steps=4)
    adjoint(*window)
    first, calls[:] = len(calls), []
    adjoint(*window)
    assert len(calls) == 2 * 4  # a step forward and a step back
    assert first > len(calls)


WEIGHT_NORM = {
    "by output": lambda: nn.Sequential(weight_norm(nn.Linear(4, 3)), nn.Tanh()),
    "by input": lambda: nn.Sequential(weight_norm(nn.Linear(4, 3), dim=1), nn.Tanh()),
    "by output, from the end": lambda: nn.Sequential(weight_norm(nn.Linear(4, 3), dim=-2), nn.Tanh()),
    "of all": lambda: nn.Sequential(weight_norm(nn.Linear(4, 3), dim=-1), nn.Tanh()),
    "two": lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), weight_norm(nn.Linear(5, 3))),
}


@every("make", WEIGHT_NORM)
def test_weight_norm_is_written_out_and_right(make):
    window = from_model(make())
    expected = slope(window)
    for estimator in (adjoint, Adjoint("log"), Adjoint(over="forward"), autograd, Forward(("hyper.lr",))):
        estimate = estimator(*window)
        torch.testing.assert_close(estimate.grads.hyper.lr, expected, rtol=1e-6, atol=0)
        assert not any("stops" in note for note in estimate.info["notes"])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every("make", {"batch norm": convnet, "a fused recurrent layer": lstm})
def test_inside_vmap_layers_with_kernels_of_their_own_are_pulled_back(make, single_precision, generator):
    problem = make(generator)
    training = problem.training(Momentum())
    meta, carry = (
        training.meta(problem.params, Momentum().hyper(lr=0.1)),
        training.init(problem.params, problem.buffers),
    )

    def outer_loss(carry):
        return problem.loss(carry.params, carry.buffers, problem.batches[0])[0]

    def derivative(lr):
        changed = meta._replace(hyper=meta.hyper._replace(lr=lr))
        return adjoint(training, outer_loss, changed, carry, problem.batches).grads.hyper.lr

    rates = torch.tensor([0.1, 0.3])
    expected = torch.stack([derivative(lr) for lr in rates])
    torch.testing.assert_close(vmap(derivative)(rates), expected, rtol=1e-4, atol=1e-5)


def test_inside_vmap_nothing_is_looked_at_but_the_numbers_are_right():
    training, outer_loss, meta, carry, batches = from_model(WEIGHT_NORM["two"]())

    def derivative(lr):
        changed = meta._replace(hyper=meta.hyper._replace(lr=lr))
        return adjoint(training, outer_loss, changed, carry, batches).grads.hyper.lr

    rates = torch.tensor([0.1, 0.3])
    torch.testing.assert_close(vmap(derivative)(rates), torch.stack([derivative(lr) for lr in rates]))


def half_labelled(z, y):
    """Of few examples, those without a label are none, and their mean is not a number."""
    return (z[:6] - y[:6]).square().mean() + (z[6:] * z[6:].tanh().detach()).mean()


def rounded(z, y):
    """A loss that is computed in single precision whatever it is given."""
    return (z.float().tanh() - y.float()).square().mean()


def rounded_and_stopped(z, y):
    return detached(z.float(), y.float())


def test_what_only_some_examples_stop_is_seen():
    assert "stops a gradient" in adjoint(*regression(half_labelled)).info["notes"][0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_cast_is_not_taken_for_a_stopped_gradient_nor_hides_one(dtype):
    assert adjoint(*regression(rounded, dtype=dtype)).info["notes"] == ()
    assert "stops a gradient" in adjoint(*regression(rounded_and_stopped, dtype=dtype)).info["notes"][0]


def test_what_is_computed_in_half_precision_is_not_judged():
    def loss(z, y):
        with torch.autocast("cpu", torch.bfloat16):
            z = z @ torch.eye(z.shape[1], dtype=z.dtype)
        return (z.float() - y).square().mean()

    assert adjoint(*regression(loss, dtype=torch.float32)).info["notes"] == ()


def several(loss, params):
    training = Training(functional.plain(lambda params, _: loss(params)), Momentum())
    meta, carry = training.meta(params, Momentum().hyper(lr=0.1, decay=0.5)), training.init(params)
    return (
        training,
        lambda c: torch.stack([p.sum() for p in c.params.values()]).sum(),
        meta,
        carry,
        4 * [None],
    )


def test_a_gate_that_starts_at_zero_hides_nothing():
    def loss(params):
        a, w = params["a"], params["w"]
        return a.square() * w.detach().sum() + (a - 1).square() + (w - 2).square().sum()

    notes = adjoint(*several(loss, {"a": torch.zeros(()), "w": torch.ones(3)})).info["notes"]
    assert "stops a gradient" in notes[0]


def test_a_large_parameter_does_not_hide_a_small_one():
    def loss(params):
        stopped = (params["s"] * params["t"].detach()).tanh().sum() + params["t"].square().sum()
        return 1e5 * (params["big"] - 1).square().sum() + stopped

    params = {"big": torch.zeros(2), "s": torch.ones(3), "t": torch.full((3,), 0.5)}
    training, outer_loss, _, carry, batches = several(loss, params)
    meta = training.meta(params, Momentum().hyper(lr={"big": 1e-6, "s": 0.1, "t": 0.1}))
    assert "stops a gradient" in adjoint(training, outer_loss, meta, carry, batches).info["notes"][0]


def test_one_tensor_for_two_parameters_is_not_noted():
    start = torch.ones(2)
    window = several(
        lambda p: (p["a"] * p["b"]).sin().sum() + p["b"].square().sum(), {"a": start, "b": start}
    )
    estimate = adjoint(*window)
    assert estimate.info["notes"] == ()
    torch.testing.assert_close(estimate.grads.hyper.lr, slope(window), rtol=1e-6, atol=0)


def test_weight_norm_that_is_used_later_is_right_too():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.later = nn.Linear(4, 3), weight_norm(nn.Linear(4, 3))
            self.register_buffer("count", torch.tensor(0))

        def forward(self, x):
            self.count += 1
            return (self.later(x) if self.count > 1 else self.first(x)).tanh()

    window = from_model(Later())
    torch.testing.assert_close(adjoint(*window).grads.hyper.lr, slope(window), rtol=1e-6, atol=0)
