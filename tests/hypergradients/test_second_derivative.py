"""Derivatives go through what a loss stops for its gradient; a derivative that is hidden is noted."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from problems import assert_near, convnet, every, lstm, slope
from torch import fake_quantize_per_tensor_affine as quantised
from torch import nn
from torch.func import grad, vmap
from torch.nn.functional import (
    dropout,
    gaussian_nll_loss,
    layer_norm,
    leaky_relu,
    relu,
    scaled_dot_product_attention,
)
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from metafop import Momentum, Training, functional
from metafop.hypergradients import Adjoint, Forward, adjoint, autograd, forward, reversible
from metafop.optimizers import ReversibleMomentum

# torch says so once in a process, where a number is taken out of a tensor.
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")

EXACT = {
    "adjoint": adjoint,
    "log": Adjoint("log"),
    "forward over reverse": Adjoint(over="forward"),
    "autograd": autograd,
    "forward": forward,
}


def regression(loss, optimizer=None, dtype=torch.float64, steps=5, width=3, seeded=False):
    """An unroll of a linear model whose loss is `loss(prediction, target)`."""
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(12, n, generator=rng, dtype=dtype) for n in (4, width))
    optimizer = optimizer or Momentum()
    training = Training(functional.plain(lambda params, x: loss(x @ params["w"], y), seeded), optimizer)
    params = {"w": torch.randn(4, width, generator=rng, dtype=dtype)}
    meta = training.init_meta(params, lr=0.1, momentum=0.5)
    carry = training.init(params, {"seed": torch.tensor(0)} if seeded else {})
    return training, lambda carry: carry.params["w"].square().sum(), meta, carry, steps * [x]


def from_model(model, steps=5):
    rng = torch.Generator().manual_seed(0)
    loss, params, buffers = functional.from_module(
        model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    )
    params = {k: 0.7 * torch.randn(p.shape, generator=rng) for k, p in params.items()}
    batch = torch.randn(6, 4, generator=rng), torch.randn(6, 3, generator=rng)
    training = Training(loss, Momentum())
    meta = training.init_meta(params, lr=0.3, momentum=0.5)
    return (
        training,
        lambda carry: torch.stack([p.square().sum() for p in carry.params.values()]).sum(),
        meta,
        training.init(params, buffers),
        steps * [batch],
    )


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


class Numbered(torch.autograd.Function):
    """tanh with a backward that takes a number out of a tensor."""

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
        return g * (1 - y.square()) * (1 + float(y.square().mean()))


def initialised_again(z, y):
    b = 2 * z
    nn.init.constant_(tensor=b[1], val=0.3)
    return (b.sin() * z.cos() - y).square().mean()


def without_grad_around(z, y):
    with torch.no_grad():
        slope = grad(lambda z: z.tanh().pow(3).sum())(z)
    return ((z.tanh() - y) * slope).square().mean()


class Wrong(torch.autograd.Function):
    """tanh with a backward that stops a gradient."""

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


def by_data(z, y):
    return ((z.tanh() - y).square() * (1 + z.data.square())).mean()


def in_place(z, y):
    scaled = z.tanh().clone()
    with torch.no_grad():
        scaled.clamp_(min=-0.2)
        scaled.mul_(2.0)
    return (scaled.exp() * z - y).square().mean()


def in_several_operations(z, y):
    with torch.no_grad():
        a = z.tanh()
        b = torch.stack([(2 * a + 1).square(), a]).sum(0)
        b += 1
    return (z.tanh() * b - y).square().mean()


def through_views(z, y):
    a = z.tanh().clone()
    with torch.no_grad():
        a[0].mul_(3.0)
        a.view(-1)[4:8].add_(a.T.reshape(-1)[4:8].square())
        a[:, 1] *= 2
    return (a * z - y).square().mean()


def returned_as_they_are(z, y):
    with torch.no_grad():
        a = z.double().contiguous().to(z)
        b = dropout(a, 0.5, training=False)
    return (z.tanh() * a.cos() * b.sin() - y).square().mean()


def written_by_flags(z, y):
    a = z.tanh().clone()
    with torch.no_grad():
        relu(a, inplace=True)
        b = (2 * z).clone()
        b[0] = a[1]
    return (a * z.tanh() + b.sin() * z.cos() - y).square().mean()


def saved_and_written(z, y):
    """A few rounds of Sinkhorn's algorithm, as for assignments that are not differentiated."""
    with torch.no_grad():
        q = (z / 2).exp()
        for _ in range(2):
            q /= q.sum(0, keepdim=True)
            q.div_(q.sum(1, keepdim=True)).sqrt_().add_(0.1)
        top, place = torch.empty(0), torch.empty(0, dtype=torch.int64)
        torch.max(q, 1, out=(top, place))
    return ((z.tanh() - y) * q).square().mean() + (z.sum(1) * top).mean()


def by_attention(z, y):
    with torch.no_grad():
        a = scaled_dot_product_attention(z[None], z[None], z[None])[0]
    return (z.tanh() * a.tanh() - y).square().mean()


def by_a_hook(z, y):
    z = z.tanh() * 1.0
    if z.requires_grad:
        z.register_hook(lambda g: g * (1 + g.detach().square()))
    return (z - y).square().mean()


def inside_vmap(z, y):
    return vmap(detached)(z, y).mean()


def inside_another_derivative(z, y):
    penalty = grad(lambda z: (z.detach() * z.tanh()).sum())(z)
    return detached(z, y) + penalty.square().mean()


def as_noise(z, y):
    """torch's normal has no derivative in the mean that it is given."""
    return ((z.tanh() - y) * torch.normal(z, torch.ones_like(z))).square().mean()


STOPPED = {
    "detach": detached,
    "no_grad": without_grad,
    "straight through": straight_through,
    "data": by_data,
    "in place": in_place,
    "several operations": in_several_operations,
    "views": through_views,
    "arguments": returned_as_they_are,
    "flags": written_by_flags,
    "saved": saved_and_written,
    "attention": by_attention,
    "a hook": by_a_hook,
    "a backward": lambda z, y: (Wrong.apply(z) - y).square().mean(),
    "vmap": inside_vmap,
    "another derivative": inside_another_derivative,
    "a clamp of torch": lambda z, y: gaussian_nll_loss(z.tanh(), y, z.square(), eps=0.3),
}


def item_without_grad(z, y):
    with torch.no_grad():
        size = z.square().mean().item()
    return (z.tanh() - y).square().mean() * size


HIDDEN = {
    "float": through_python,
    "item": lambda z, y: (z.tanh() - y).square().mean() * z.square().mean().item(),
    "item, detached": lambda z, y: (z.tanh() - y).square().mean() * z.detach().square().mean().item(),
    "item, without grad": item_without_grad,
    "tolist": lambda z, y: (z.tanh() - y).square().mean() * sum(z.square().mean(0).tolist()),
    "a new tensor": lambda z, y: ((z.tanh() - y).square() * torch.tensor(z)).mean(),
    "a number in a backward": lambda z, y: (Numbered.apply(z) - y).square().mean(),
    "a number among settings": lambda z, y: (leaky_relu(z, z.detach().cos().mean()) - y).square().mean(),
    "a number in a text": lambda z, y: (z.tanh() - y).square().mean() * float(f"{z.square().mean()}"),
    "a derivative without grad": without_grad_around,
    "an initialiser": initialised_again,
    "a quantiser": lambda z, y: (quantised(z, 0.1, 0, -50, 50).tanh() - y).square().mean(),
    "rounded on the way": lambda z, y: (
        (z.softmax(1, dtype=torch.float32) - y).square().mean() * float(z.square().mean())
    ),
    "a third derivative": lambda z, y: (
        grad(lambda z: layer_norm(z, z.shape[1:]).pow(3).sum())(z).sub(y).square().mean()
    ),
}


def near(derivative, window):
    torch.testing.assert_close(derivative, slope(window), rtol=1e-6, atol=0)


@every("estimator", EXACT)
@every("loss", STOPPED)
def test_derivatives_go_through_what_is_stopped_and_a_note_says_so(loss, estimator):
    window = regression(loss)
    estimate = estimator(*window)
    near(estimate.grads.hyper.lr, window)
    if loss not in (by_data, returned_as_they_are):  # which stop no more under torch.func than they should
        assert "The loss stops a gradient: " in " ".join(estimate.info["notes"])


@every("loss", {k: STOPPED[k] for k in ("detach", "several operations", "in place", "vmap")})
def test_compiled_steps_go_through_what_is_stopped(loss):
    window = regression(loss)
    for _ in range(2):  # built, and found again
        estimate = Adjoint(compile=True)(*window)
        near(estimate.grads.hyper.lr, window)
        assert "The loss stops a gradient: " in " ".join(estimate.info["notes"])


def test_the_note_names_the_line():
    (note,) = adjoint(*regression(detached)).info["notes"]
    line = detached.__code__.co_firstlineno + 2
    assert f"detach (test_second_derivative.py, line {line})" in note


def test_drawn_numbers_depend_on_what_they_are_drawn_from():
    window = regression(as_noise, seeded=True)
    near(adjoint(*window).grads.hyper.lr, window)


def test_a_power_iteration_without_gradients_is_differentiated():
    window = from_model(nn.Sequential(spectral_norm(nn.Linear(4, 3)), nn.Tanh()), steps=2)
    near(adjoint(*window).grads.hyper.lr, window)  # of two steps: the first buffers do not depend on lr


def test_a_gradient_that_is_stopped_from_a_later_step_on_is_seen_through():
    training, outer_loss, meta, carry, batches = regression(detached)
    later = Training(
        functional.plain(
            lambda params, batch: (
                detached(batch[0] @ params["w"], batch[1])
                if len(batch[0]) > 8
                else (batch[0] @ params["w"] - batch[1]).square().mean()
            )
        ),
        training.optimizer,
    )
    x = batches[0]
    y = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    window = later, outer_loss, meta, carry, [(x[:8], y[:8]), (x[:8], y[:8]), (x, y), (x, y)]
    estimate = adjoint(*window)
    near(estimate.grads.hyper.lr, window)
    assert "stops a gradient" in estimate.info["notes"][0]


def test_a_fused_layer_and_a_stopped_gradient_in_one_loss(generator):
    """torch cannot differentiate its fused LSTM forward."""
    rnn = nn.LSTM(2, 3, batch_first=True)
    x, y = torch.randn(4, 5, 2, generator=generator), torch.randn(4, 3, generator=generator)
    loss, params, _ = functional.from_module(rnn, lambda rnn, batch: detached(rnn(batch)[0][:, -1], y))
    training = Training(loss, Momentum())
    meta, carry = training.init_meta(params, lr=0.5), training.init(params)
    window = training, lambda c: c.params["weight_hh_l0"].square().sum(), meta, carry, 3 * [x]
    for estimator in (adjoint, autograd, Forward(("lr",))):
        near(estimator(*window).grads.hyper.lr, window)


def test_a_derivative_of_a_hypergradient_goes_through_what_is_stopped():
    training, outer_loss, meta, carry, batches = regression(detached, steps=2)

    def derivative(lr):
        changed = meta._replace(hyper=meta.hyper._replace(lr=lr))
        return adjoint(training, outer_loss, changed, carry, batches).grads.hyper.lr

    lr, h = meta.hyper.lr, 1e-5
    expected = (derivative(lr + h) - derivative(lr - h)) / (2 * h)
    torch.testing.assert_close(grad(derivative)(lr), expected, rtol=1e-6, atol=0)


@every("estimator", EXACT)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@every("loss", HIDDEN)
def test_a_derivative_that_is_hidden_is_noted(loss, estimator):
    window = regression(loss)
    estimate = estimator(*window)
    if loss in (without_grad_around, initialised_again) and estimator is forward:  # no_grad stops no tangent
        near(estimate.grads.hyper.lr, window)
        return
    assert "The loss hides a derivative: " in " ".join(estimate.info["notes"])
    assert (estimate.grads.hyper.lr - slope(window)).abs() > 1e-3 * slope(window).abs()


def test_all_that_leave_out_what_is_hidden_give_one_number():
    window = regression(through_python)
    expected = autograd(*window).grads
    for estimator in (adjoint, Adjoint("log"), Adjoint(over="forward"), forward):
        assert_near(estimator(*window).grads, expected, 1e-10)


def test_detach_in_place_is_refused():
    def loss(z, y):
        a = z.tanh() * 2
        a.detach_()
        return (z * a - y).square().mean()

    with pytest.raises(NotImplementedError, match=r"detach_ \(test_second.* Write x = x.detach"):
        adjoint(*regression(loss))


def test_what_does_nothing_at_one_step_is_looked_at_again_at_others():
    training, outer_loss, meta, carry, batches = regression(through_python)
    rng = torch.Generator().manual_seed(1)
    y = torch.randn(12, 3, generator=rng)
    loss = functional.plain(
        lambda params, batch: (
            (batch[0] @ params["w"] - y).square().mean()
            + batch[1] * through_python(batch[0] @ params["w"], y)
        )
    )
    for switch in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]):
        window = (
            Training(loss, training.optimizer),
            outer_loss,
            meta,
            carry,
            [(batches[0], torch.tensor(float(on))) for on in switch],
        )
        for estimator in (adjoint, autograd, forward):
            assert any("hides a derivative" in note for note in estimator(*window).info["notes"])


def test_threads_may_differentiate_forward_at_once():
    window = regression(detached)
    expected = forward(*window).grads.hyper.lr
    with ThreadPoolExecutor(4) as pool:
        estimators = 4 * [forward, Adjoint(over="forward")]
        for each in pool.map(lambda estimator: estimator(*window).grads.hyper.lr, estimators):
            torch.testing.assert_close(each, expected, rtol=1e-10, atol=0)


@every("loss", {"a stopped gradient": detached, "a hidden one": through_python})
def test_reversible_notes_them_too(loss):
    assert len(reversible(*regression(loss, ReversibleMomentum())).info["notes"]) == 1


SOUND = {
    "relu": lambda z, y: (z.relu() - y).square().mean(),
    "max": lambda z, y: (z - y).square().amax(1).mean() + z.tanh().sort(0).values[:3].sum(),
    "logsumexp": lambda z, y: (z.logsumexp(1) - y.sum(1)).square().mean(),
    "a stopped constant": lambda z, y: (z.tanh() - y.detach()).square().mean(),
    "a stopped shift": lambda z, y: ((z - z.detach().amax()).exp().sum(1).log() + z.detach().amax()).mean(),
    "a number to look at": lambda z, y: (z.tanh() - y).square().mean() + 0 * float(z.sum()),
    "linear": lambda z, y: (z * y).mean(),
    "tiny": lambda z, y: 1e-12 * (z.tanh() - y).square().mean(),
    "huge": lambda z, y: 1e12 * (z.tanh() - y).square().mean(),
}


@every("estimator", EXACT)
@every("loss", SOUND)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_is_sound_is_not_noted(loss, dtype, estimator):
    window = regression(loss, dtype=dtype, width=40)
    assert estimator(*window).info["notes"] == ()


def is_noted(window):
    return any("hides a derivative" in note for note in adjoint(*window).info["notes"])


def test_single_precision_is_looked_at_in_double():
    def loss(z, y):
        return through_python(z.relu() - 0.1, y)

    assert is_noted(regression(loss, dtype=torch.float32, width=40))


def test_a_loss_that_closes_over_single_precision_is_looked_at_as_it_is():
    rng = torch.Generator().manual_seed(0)
    fixed = torch.randn(3, 3, generator=rng, dtype=torch.float32)
    assert is_noted(regression(lambda z, y: through_python(z @ fixed, y), dtype=torch.float32))


def test_the_look_can_be_skipped_by_name():
    skipping = Adjoint(skip=("hessian",))
    assert skipping(*regression(through_python)).info["notes"] == ()
    window = regression(detached)
    estimate = skipping(*window)
    assert estimate.info["notes"] == ()
    near(estimate.grads.hyper.lr, window)


def evaluations(loss):
    """Return how often a loss of four steps is computed, in a training's first estimate and its second."""
    calls = []

    def counted(z, y):
        calls.append(1)
        return loss(z, y)

    window, counts = regression(counted, steps=4), []
    for _ in range(2):
        adjoint(*window)
        counts.append(len(calls))
        calls.clear()
    return counts


def test_what_hides_nothing_is_not_computed_again():
    """No step is taken more than twice; once for a training it is found how, and how much is kept."""
    assert evaluations(lambda z, y: (z.tanh() - y).square().mean()) == [2 * 4 + 2, 2 * 4]


def test_what_may_hide_a_derivative_is_compared_once_for_a_training():
    first, second = evaluations(through_python)
    assert first > 2 * 4 + 1
    assert second == 2 * 4


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
    for estimator in (adjoint, Adjoint("log"), Adjoint(over="forward"), autograd, Forward(("lr",))):
        estimate = estimator(*window)
        torch.testing.assert_close(estimate.grads.hyper.lr, expected, rtol=1e-6, atol=0)
        assert not any("derivative:" in note for note in estimate.info["notes"])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every("make", {"batch norm": convnet, "a fused recurrent layer": lstm})
def test_inside_vmap_layers_with_kernels_of_their_own_are_pulled_back(make, single_precision, generator):
    problem = make(generator)
    training = problem.training(Momentum())
    meta, carry = (
        training.init_meta(problem.params, lr=0.1),
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
    return (z[:6] - y[:6]).square().mean() + z[6:].mean() * float(z[6:].tanh().mean())


def rounded(z, y):
    """A loss that is computed in single precision whatever it is given."""
    return (z.float().tanh() - y.float()).square().mean()


def rounded_and_hidden(z, y):
    return through_python(z.float(), y.float())


def test_what_only_some_examples_hide_is_seen():
    assert is_noted(regression(half_labelled))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_cast_is_not_taken_for_a_hidden_derivative_nor_keeps_one_from_sight(dtype):
    def logged(z, y):
        float(z.sum())
        return rounded(z, y)

    assert not is_noted(regression(logged, dtype=dtype))
    assert is_noted(regression(rounded_and_hidden, dtype=dtype))


def test_what_is_computed_in_half_precision_is_not_judged():
    def loss(z, y):
        float(z.sum())
        with torch.autocast("cpu", torch.bfloat16):
            z = z @ torch.eye(z.shape[1], dtype=z.dtype)
        return (z.float() - y).square().mean()

    assert adjoint(*regression(loss, dtype=torch.float32)).info["notes"] == ()


def several(loss, params):
    training = Training(functional.plain(lambda params, _: loss(params)), Momentum())
    meta, carry = training.init_meta(params, lr=0.1, momentum=0.5), training.init(params)
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
        return a.square() * float(w.sum()) + (a - 1).square() + (w - 2).square().sum()

    assert is_noted(several(loss, {"a": torch.zeros(()), "w": torch.ones(3)}))


def test_a_large_parameter_does_not_hide_a_small_one():
    def loss(params):
        hidden = (params["s"] * float(params["t"].sum())).tanh().sum() + params["t"].square().sum()
        return 1e5 * (params["big"] - 1).square().sum() + hidden

    params = {"big": torch.zeros(2), "s": torch.ones(3), "t": torch.full((3,), 0.5)}
    training, outer_loss, _, carry, batches = several(loss, params)
    meta = training.init_meta(params, lr={"big": 1e-6, "s": 0.1, "t": 0.1})
    assert is_noted((training, outer_loss, meta, carry, batches))


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
