"""torch.autograd records the steps of an estimate where that is right, and else torch.func takes them."""

from collections import Counter

import pytest
import torch
from problems import assert_near, every

from metafop import Adam, Momentum, Training, functional, tree
from metafop.hypergradients import Adjoint, adjoint, autograd
from metafop.hypergradients.steps import RecordedSteps, TransformedSteps


class Doubled(torch.autograd.Function):
    """2 x², whose backward hides the second derivative."""

    @staticmethod
    def forward(x):
        return 2 * x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.tensor((4 * x).tolist(), dtype=x.dtype) * d


def plain(z, y, count):
    return (z.tanh() - y).square().mean()


def stopping(z, y, count):
    return ((z.tanh() - 0.5 * z.detach().tanh()) * (z.tanh() - y)).square().mean()


def stopping_late(z, y, count):
    """Stops a gradient from the third step on, which no look at the first one tells."""
    return (
        torch.where(count > 2, stopping(z, y, count), plain(z, y, count))
        if late(count)
        else plain(z, y, count)
    )


def late(count):
    return int(count) > 2


def without_grad_late(z, y, count):
    if not late(count):
        return plain(z, y, count)
    with torch.no_grad():
        scale = z.square().mean().sqrt()
    return (z.tanh() - scale * y).square().mean()


def by_a_function(z, y, count):
    return (Doubled.apply(z).sin() - y).square().mean()


def with_a_transform(z, y, count):
    return torch.func.vmap(lambda a, b: (a.tanh() - b).square().sum())(z, y).mean()


def writing_into_its_own(z, y, count):
    out = torch.zeros_like(z)
    out[:, 0] = z[:, 0].tanh()
    return (out - y).square().mean()


LOSSES = {
    f.__name__: f
    for f in (plain, stopping, stopping_late, without_grad_late, with_a_transform, writing_into_its_own)
}


def window(loss, optimizer=None, steps=6):
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, n, generator=rng, dtype=torch.float64) for n in (4, 2))

    def counted(params, buffers, batch):
        return loss(batch @ params["w"], y, buffers["count"]), {"count": buffers["count"] + 1}

    training = Training(counted, optimizer or Momentum())
    params = {"w": torch.randn(4, 2, generator=rng, dtype=torch.float64)}
    meta = training.init_meta(params, lr=0.1)
    carry = training.init(params, {"count": torch.tensor(0)})
    batches = [x + 0.1 * t for t in range(steps)]
    return training, lambda c: (x @ c.params["w"] - y).square().mean(), meta, carry, batches


def slope(given, name="lr", h=1e-6):
    """The derivative in a hyperparameter, by differences of whole runs."""
    training, outer_loss, meta, carry, batches = given
    ends = []
    for sign in (1, -1):
        hyper = meta.hyper._replace(**{name: getattr(meta.hyper, name) + sign * h})
        now = carry
        for batch in batches:
            now, _ = training.step(meta._replace(hyper=hyper), now, batch)
        ends.append(outer_loss(now))
    return (ends[0] - ends[1]) / (2 * h)


@every("estimator", {"adjoint": adjoint, "log": Adjoint("log"), "all": Adjoint("all"), "autograd": autograd})
@every("loss", LOSSES)
def test_what_a_loss_does_at_any_step_stays_in_the_derivative_of_the_run(loss, estimator):
    given = window(loss)
    assert_near(estimator(*given).grads.hyper.lr, slope(given), rtol=1e-6)


@every("loss", LOSSES)
def test_the_numbers_are_those_of_torch_func(loss):
    training, outer_loss, meta, carry, batches = window(loss, Adam())

    def inside(lr):
        changed = meta._replace(hyper=meta.hyper._replace(lr=lr))
        return adjoint(training, outer_loss, changed, carry, batches).grads

    if loss in (stopping_late, without_grad_late):
        pytest.skip("Python reads a buffer, which vmap cannot")
    by_func = torch.func.vmap(inside)(meta.hyper.lr[None])
    recorded = adjoint(training, outer_loss, meta, carry, batches).grads
    assert_near(tree.map(lambda x: x[0], by_func), recorded, rtol=1e-10)


def taken(estimator, monkeypatch, steps, kind=RecordedSteps):
    """How often each step is taken by an estimate, the check of the first left out."""
    counts, forward = Counter(), kind.forward

    def counted(self, t, kept):
        counts[t] += 1
        return forward(self, t, kept)

    monkeypatch.setattr(kind, "forward", counted)
    training, *rest = window(plain, steps=steps)
    estimator(training, *rest)
    return [counts[t] for t in range(steps)]


@pytest.mark.parametrize("steps", [1, 2, 40, 150])
@every("keep, passes", {"all": ("all", 1), "sqrt": ("sqrt", 2), "cbrt": ("cbrt", 3)})
def test_no_step_is_taken_more_often_than_is_said(keep, passes, steps, monkeypatch):
    counts = taken(Adjoint(keep, skip=("repeat",)), monkeypatch, steps)
    assert max(counts) <= passes
    assert min(counts) == 1 or steps < 2


def test_what_fits_into_the_memory_is_not_taken_again(monkeypatch):
    counts = taken(Adjoint(memory=2**30, skip=("repeat",)), monkeypatch, 60)
    assert counts == 60 * [1]
    with monkeypatch.context() as again:
        counts = taken(Adjoint(memory=4000, skip=("repeat",)), again, 60)
    assert 1 < max(counts) < 6


def test_the_default_takes_no_step_more_than_twice(monkeypatch):
    assert max(taken(Adjoint(skip=("repeat",)), monkeypatch, 200)) == 2


def test_a_loss_that_torch_autograd_cannot_record_is_taken_by_torch_func(monkeypatch):
    counts, forward = Counter(), TransformedSteps.forward

    def counted(self, t, kept):
        counts[t] += 1
        return forward(self, t, kept)

    monkeypatch.setattr(TransformedSteps, "forward", counted)
    adjoint(*window(plain))
    assert not counts
    adjoint(*window(stopping))
    assert counts


@every("estimator", {"adjoint": adjoint, "autograd": autograd})
def test_an_autograd_function_is_not_recorded_unseen(estimator):
    """Its derivative may be wrong, as this one's is: no mode of torch functions sees it, the graph does."""
    (note,) = estimator(*window(by_a_function)).info["notes"]
    assert "The loss hides a derivative" in note
    assert "test_recorded_steps.py, line" in note


def test_an_estimate_is_the_same_in_every_gradient_mode():
    given = window(plain)
    expected = adjoint(*given)
    with torch.no_grad():
        assert_near(adjoint(*given).grads, expected.grads, rtol=0)


def test_a_loss_that_closes_over_what_requires_a_gradient_leaves_that_alone():
    teacher = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    training, outer_loss, meta, carry, batches = window(
        lambda z, y, count: (z.tanh() - teacher[:1] * y).square().mean()
    )
    estimate = adjoint(training, outer_loss, meta, carry, batches)
    assert estimate.value.isfinite()
    assert teacher.grad is None
    assert not estimate.value.requires_grad


def test_functional_losses_with_a_seed_are_recorded():
    loss = functional.plain(
        lambda p, x: torch.nn.functional.dropout(x @ p["w"], 0.5).square().mean(), seeded=True
    )
    training, params = Training(loss, Momentum()), {"w": torch.ones(4, 2, dtype=torch.float64)}
    meta, carry = training.init_meta(params, lr=0.1), training.init(params, {"seed": torch.tensor(3)})
    given = (
        training,
        lambda c: c.params["w"].square().sum(),
        meta,
        carry,
        5 * [torch.ones(3, 4, dtype=torch.float64)],
    )
    assert_near(adjoint(*given).grads.hyper.lr, slope(given), rtol=1e-6)


def swished(z):
    return (z.tanh() * z.sigmoid() * z).square() * torch.exp(-z * z)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@every("build", {"scripted": torch.jit.script, "compiled": torch.compile})
def test_a_function_that_is_built_inside_the_loss_gives_the_numbers_of_the_function(build):
    """A compiler that traced the mode in which losses are watched would get them wrong."""
    built = build(swished)
    ours, expected = (window(lambda z, y, count, f=f: (f(z) - y).square().mean()) for f in (built, swished))
    training, _, meta, carry, batches = ours
    plain = expected[0].evaluate(meta, carry, batches[0])
    assert_near(training.evaluate(meta, carry, batches[0]).grads, plain.grads, rtol=1e-12)
    for estimator in (adjoint, autograd):
        assert_near(estimator(*ours).grads.hyper, estimator(*expected).grads.hyper, rtol=1e-10)
