"""The forward hypergradient is that of the whole graph, within a window and through windows."""

import copy
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from problems import (
    FAMILIES,
    MODELS,
    OPTIMIZERS,
    Problem,
    Setting,
    assert_near,
    assert_same_bits,
    batch_loss,
    convnet,
    every,
    filled,
    mlp,
    moved,
)
from torch import nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from metafop import SGD, Adam, Carry, LowRank, Meta, Online, Scalar, Seen, Training, functional, tree
from metafop.hypergradients import autograd
from metafop.hypergradients.forward import Forward, ForwardCarry, forward


def prepared(problem, setting, family, generator):
    """Return a training, a meta that has learned something, a carry, and the loss of the last batch."""
    training = problem.training(setting.optimizer, family)
    meta = training.init_meta(problem.params, generator, **setting.hyper()._asdict())
    carry = training.init(problem.params, problem.buffers)

    def outer_loss(carry):
        return problem.loss(carry.params, carry.buffers, problem.batches[-1])[0]

    return training, outer_loss, Meta(meta.hyper, moved(meta.precond, generator)), carry


def terms(outer_loss, start, end):
    """Return ‖∂value/∂θ‖ ‖Δθ‖, the size of the terms that a hypergradient adds up; they may cancel."""
    toward = grad(lambda params: outer_loss(end._replace(params=params)))(end.params)
    return tree.norm(toward) * tree.norm({k: end.params[k] - p for k, p in start.params.items()})


@every("make", MODELS)
@every("family", FAMILIES)
@every("setting", OPTIMIZERS)
def test_forward_is_the_derivative_of_the_whole_graph(setting, family, make, generator):
    problem = make(generator)
    training, outer_loss, meta, carry = prepared(problem, setting, family, generator)
    window = (training, outer_loss, meta, carry, problem.batches[:3])
    ahead, whole = forward(*window), autograd(*window)
    assert_near(ahead.grads, whole.grads, rtol=1e-10, size=terms(outer_loss, carry, whole.carry))
    assert_near(ahead.value, whole.value, rtol=1e-14)
    assert_near(ahead.carry, whole.carry, rtol=1e-12)
    assert ahead.info["notes"] == whole.info["notes"]
    assert_near(ahead.info["values"], whole.info["values"], rtol=1e-12)


@every("setting", {k: OPTIMIZERS[k] for k in ("sgd", "nesterov", "adam, short")})
def test_forward_goes_through_online_learning(setting, generator):
    problem = convnet(generator)
    training, _, meta, carry = prepared(problem, setting, LowRank(rank=2), generator)
    online = Online(training, Adam(), learn=("precond", "lr"))
    outer_meta, state = online.init_meta(meta, lr=0.01, weight_decay=0.1), online.init(meta, carry)

    def outer_loss(state):
        return problem.loss(state.params, state.buffers, problem.batches[4])[0] + state.meta.hyper.lr

    window = (online, outer_loss, outer_meta, state, problem.batches[:4])
    assert_near(forward(*window).grads, autograd(*window).grads, rtol=1e-10)


@every("make", MODELS)
def test_two_windows_are_one_that_is_longer(make, generator):
    problem = make(generator)
    training, outer_loss, meta, carry = prepared(
        problem, OPTIMIZERS["adam, short"], LowRank(rank=2), generator
    )
    first = forward(training, outer_loss, meta, forward.init(carry), problem.batches[:2])
    second = forward(training, outer_loss, meta, first.carry, problem.batches[2:4])
    whole = autograd(training, outer_loss, meta, carry, problem.batches[:4])
    assert isinstance(second.carry, ForwardCarry)
    assert_near(second.grads, whole.grads, rtol=1e-10)
    assert_near(second.carry.carry, whole.carry, rtol=1e-12)


def test_from_a_plain_carry_a_window_starts_anew(generator):
    problem = mlp(generator)
    training, outer_loss, meta, carry = prepared(problem, OPTIMIZERS["heavy ball"], Scalar(), generator)
    first = forward(training, outer_loss, meta, carry, problem.batches[:2])
    assert isinstance(first.carry, Carry)
    window = (training, outer_loss, meta, first.carry, problem.batches[2:4])
    assert_near(forward(*window).grads, autograd(*window).grads, rtol=1e-10)


def test_what_learn_does_not_name_has_zeros_and_a_note(generator):
    problem = convnet(generator)
    training, outer_loss, meta, carry = prepared(problem, OPTIMIZERS["nesterov"], LowRank(rank=2), generator)
    window = (training, outer_loss, meta, carry, problem.batches[:4])
    named = Forward(learn=("lr", "precond.4"))(*window)
    whole, grads = tree.named(autograd(*window).grads), tree.named(named.grads)
    learned = {"hyper.lr", "precond.4.weight", "precond.4.bias"}
    expected = {k: x if k in learned else torch.zeros_like(x) for k, x in whole.items()}
    assert_near(grads, expected, rtol=1e-10)
    assert "hyper.momentum, hyper.weight_decay, precond.0.weight" in named.info["notes"][0]


def test_a_learning_rate_for_each_parameter_has_a_derivative_of_its_own(generator):
    problem = mlp(generator)
    training, outer_loss, _, carry = prepared(problem, OPTIMIZERS["sgd"], None, generator)
    meta = training.init_meta(problem.params, lr={k: p.std() for k, p in problem.params.items()})
    window = (training, outer_loss, meta, carry, problem.batches[:4])
    ahead, whole = Forward(learn=("lr",))(*window), autograd(*window)
    assert_near(ahead.grads.hyper.lr, whole.grads.hyper.lr, rtol=1e-10)


def test_an_outer_loss_in_eval_mode_misses_what_autograd_misses(generator):
    problem = convnet(generator)
    training, _, meta, carry = prepared(problem, OPTIMIZERS["sgd"], None, generator)
    in_eval, _, _ = functional.from_module(problem.model.eval(), batch_loss)

    def outer_loss(carry):
        return in_eval(carry.params, carry.buffers, problem.batches[4])[0]

    window = (training, outer_loss, meta, carry, problem.batches[:4])
    ahead, whole = forward(*window), autograd(*window)
    assert_near(ahead.grads, whole.grads, rtol=1e-10)
    assert ahead.info["notes"] == whole.info["notes"] != ()


class Cube(torch.autograd.Function):
    """x³, which torch cannot differentiate forward, for want of a jvp."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *cotangents):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangents[0]


class Cubic(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        return cast(Any, Cube.apply(self.linear(x))).mean(1)


class Attention(nn.Module):
    """Attention with one head, by the kernel that torch fuses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 12)

    def forward(self, x):
        q, k, v = self.linear(x)[:, None].chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)[:, 0].mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


def sequences(layer, generator):
    """Return the problem of telling sequences of five apart with a layer."""
    model = filled(nn.Sequential(layer, nn.Linear(4, 2)), generator)
    batches = [
        (torch.randn(6, 5, 3, generator=generator), torch.randint(2, (6,), generator=generator))
        for _ in range(5)
    ]
    return Problem(model, *functional.from_module(model, batch_loss), batches)


@every("setting", {k: OPTIMIZERS[k] for k in ("sgd, decayed", "heavy ball", "adam, short")})
def test_what_cannot_go_forward_goes_in_reverse_and_says_so(setting, generator):
    problem = sequences(Cubic(), generator)
    training, outer_loss, meta, carry = prepared(problem, setting, LowRank(rank=2), generator)
    window = (training, outer_loss, meta, carry, problem.batches[:4])
    ahead = forward(*window)
    assert_near(ahead.grads, autograd(*window).grads, rtol=1e-10)
    assert "forward over reverse failed: You must implement the jvp" in ahead.info["notes"][0]


def test_a_recurrent_layer_goes_in_reverse_and_says_so(generator):
    torch.set_default_dtype(torch.float32)  # in float64 torch does not fuse it
    problem = sequences(Recurrent(), generator)
    training, outer_loss, meta, carry = prepared(problem, OPTIMIZERS["heavy ball"], Scalar(), generator)
    window = (training, outer_loss, meta, carry, problem.batches[:4])
    ahead = forward(*window)
    assert_near(ahead.grads, autograd(*window).grads, rtol=1e-4)
    assert "forward over reverse failed" in ahead.info["notes"][0]


def test_attention_goes_forward(generator):
    problem = sequences(Attention(), generator)
    training, outer_loss, meta, carry = prepared(problem, OPTIMIZERS["heavy ball"], Scalar(), generator)
    window = (training, outer_loss, meta, carry, problem.batches[:4])
    ahead = forward(*window)
    with sdpa_kernel(SDPBackend.MATH):
        assert_near(ahead.grads, autograd(*window).grads, rtol=1e-10)
    assert ahead.info["notes"] == ()


@dataclass(frozen=True)
class Polyak(Training):
    """A training that takes longer steps the larger the loss is."""

    def advance(self, meta, carry, seen):
        grads = {k: g * seen.value.tanh() for k, g in seen.grads.items()}
        return super().advance(meta, carry, Seen(seen.value, grads, seen.buffers))


@every("layer", {"forward": Attention, "reverse": Cubic})
def test_a_step_that_looks_at_the_loss_has_its_derivative(layer, generator):
    problem = sequences(layer(), generator)
    _, outer_loss, meta, carry = prepared(problem, OPTIMIZERS["sgd"], None, generator)
    window = (Polyak(problem.loss, SGD()), outer_loss, meta, carry, problem.batches[:4])
    with sdpa_kernel(SDPBackend.MATH):
        assert_near(forward(*window).grads, autograd(*window).grads, rtol=1e-10)


@dataclass(frozen=True)
class Averaging(Training):
    """A training that keeps a mean of its parameters among the buffers, and stays near it."""

    def advance(self, meta, carry, seen):
        after, info = super().advance(meta, carry, seen)
        mean = {k: 0.5 * (carry.buffers[k] + p) for k, p in after.params.items()}
        return Carry({k: 0.9 * p + 0.1 * mean[k] for k, p in after.params.items()}, after.opt, mean), info


def test_buffers_are_held_even_where_a_training_writes_them(generator):
    problem = mlp(generator)
    loss = functional.plain(lambda params, batch: problem.loss(params, {}, batch)[0])
    _, outer_loss, meta, _ = prepared(problem, OPTIMIZERS["sgd"], None, generator)
    training = Averaging(loss, SGD())
    carry = training.init(problem.params, dict(problem.params))

    def held_loss(carry):
        return outer_loss(carry._replace(buffers={}))

    window = (training, held_loss, meta, carry, problem.batches[:4])
    assert_near(forward(*window).grads, autograd(*window).grads, rtol=1e-10)


@dataclass(frozen=True)
class Decaying(SGD):
    """Descent with lr / (1 + t), its t an integer."""

    def init(self, params) -> Any:
        return {"t": torch.tensor(0)}

    def update(self, hyper, params, opt: Any, direction) -> Any:
        slower = hyper._replace(lr=hyper.lr / (1 + opt["t"]))
        return super().update(slower, params, (), direction)[0], {"t": opt["t"] + 1}


def test_integers_are_carried_along(generator):
    problem = mlp(generator)
    training, outer_loss, meta, carry = prepared(
        problem, Setting(Decaying(), {"lr": 0.3}, torch.optim.SGD), Scalar(), generator
    )
    window = (training, outer_loss, meta, carry, problem.batches[:4])
    ahead = forward(*window)
    assert_near(ahead.grads, autograd(*window).grads, rtol=1e-10)
    assert torch.equal(ahead.carry.opt["t"], torch.tensor(4))


def test_forward_is_pure(generator):
    problem = convnet(generator)
    training, outer_loss, meta, carry = prepared(problem, OPTIMIZERS["adam, short"], Scalar(), generator)
    start = forward(training, outer_loss, meta, forward.init(carry), problem.batches[:2]).carry
    before = copy.deepcopy((meta, start))
    first, second = (forward(training, outer_loss, meta, start, problem.batches[2:4]) for _ in range(2))
    assert_same_bits(first[:3], second[:3])
    assert_same_bits((meta, start), before)


def test_vmap_takes_many_learning_rates_at_once(generator):
    problem = convnet(generator)
    training, outer_loss, meta, carry = prepared(problem, OPTIMIZERS["sgd"], None, generator)

    def slope(lr):
        steered = tree.replace(meta, {"hyper.lr": lr})
        return forward(training, outer_loss, steered, carry, problem.batches[:3]).grads.hyper.lr

    rates = torch.tensor([0.01, 0.1, 0.3])
    assert_near(vmap(slope)(rates), torch.stack([slope(lr) for lr in rates]), rtol=1e-10)


def quadratic(lr):
    """Return ½ Σ h θ², from θ = 1 with curvatures from 0.01 to 1."""
    h = torch.logspace(-2, 0, 5)
    loss = functional.plain(lambda params, batch: 0.5 * (h * params["w"].square()).sum())
    training, params = Training(loss, SGD()), {"w": torch.ones(5)}
    return training, training.init_meta(params, lr=lr), training.init(params)


def quadratic_loss(carry):
    return carry.params["w"].square().sum()


def test_a_learning_rate_is_learned_every_few_steps():
    training, meta, carry = quadratic(lr=0.02)
    learner = Forward(learn=("lr",))
    fixed, state = run(training, meta, carry, 120), learner.init(carry)
    for _ in range(30):
        estimate = learner(training, quadratic_loss, meta, state, 4 * [()])
        change = -0.15 * estimate.grads.hyper.lr.sign()  # of log lr
        meta, state = tree.replace(meta, {"hyper.lr": meta.hyper.lr * change.exp()}), estimate.carry
    assert quadratic_loss(state.carry) < 0.2 * quadratic_loss(fixed)


def run(training, meta, carry, steps):
    for _ in range(steps):
        carry, _ = training.step(meta, carry, ())
    return carry


def wave(carry):
    return carry.params["w"].cos().sum()


def test_a_hypergradient_that_overflows_where_training_does_not_is_noted():
    # θ' = θ + lr sin θ, which is chaotic
    loss = functional.plain(lambda params, batch: params["w"].cos().sum())
    training, params = Training(loss, SGD()), {"w": torch.ones(1)}
    window = (training, wave, training.init_meta(params, lr=100.0))
    estimate = forward(*window, training.init(params), 200 * [()])
    assert estimate.value.isfinite()
    assert not estimate.grads.hyper.lr.isfinite()
    assert f"not finite after {estimate.info['overflow']} of 200 steps" in estimate.info["notes"][0]


LINE = quadratic(lr=0.1)
REFUSED = {
    "no tuple": (lambda: Forward(learn=cast(Any, "hyper.lr")), ["Forward", "'hyper.lr'", "Pass"]),
    "no names": (lambda: Forward(learn=()), ["Forward", "learn=()", "Pass"]),
    "an unknown name": (
        lambda: Forward(learn=("rate",))(LINE[0], quadratic_loss, *LINE[1:], [()]),
        ["'rate'", "'lr'", "Name one"],
    ),
}


@every("call, words", REFUSED)
def test_what_is_refused_is_named_with_a_remedy(call, words):
    with pytest.raises(ValueError, match=r"\. (Pass|Name) ") as error:
        call()
    assert all(word in str(error.value) for word in words)


def test_tangents_of_other_numbers_are_refused():
    training, meta, carry = quadratic(lr=0.1)
    estimate = forward(training, quadratic_loss, meta, forward.init(carry), [()])
    with pytest.raises(ValueError, match=r"for 2 numbers, but 1 are learned \(hyper.lr\). Start again"):
        Forward(learn=("lr",))(training, quadratic_loss, meta, estimate.carry, [()])
