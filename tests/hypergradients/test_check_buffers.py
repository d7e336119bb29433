"""A derivative that is missed through buffers is noted, and nothing is where none is missed."""

import pytest
import torch
from problems import every
from torch import nn

from metafop import Momentum, Training, functional
from metafop.hypergradients import Adjoint, Truncated, adjoint, autograd, forward, reversible
from metafop.optimizers import ReversibleMomentum

ESTIMATORS = {
    "adjoint": adjoint,
    "log": Adjoint("log"),
    "autograd": autograd,
    "forward": forward,
    "truncated": Truncated(4),
}


def window(loss, buffers, optimizer=None, steps=6, outer_loss=None):
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 4, generator=rng), torch.randn(6, 3, generator=rng).softmax(-1)
    optimizer = optimizer or Momentum()
    training = Training(lambda params, buffers, x: loss(x @ params["w"], y, buffers), optimizer)
    params = {"w": torch.randn(4, 3, generator=rng)}
    meta = training.init_meta(params, lr=0.5, momentum=0.5)
    return (
        training,
        outer_loss or (lambda carry: carry.params["w"].square().sum()),
        meta,
        training.init(params, buffers),
        steps * [x],
    )


def centred(z, y, buffers):
    """A softmax does not see it if all of the centre moves alike."""
    value = -(y * (z - buffers["centre"]).log_softmax(-1)).sum(-1).mean()
    return value, {"centre": 0.9 * buffers["centre"] + 0.1 * z.detach().mean(0)}


def centred_late(z, y, buffers):
    """The first steps do not read the centre."""
    read = (buffers["count"] > 3) * buffers["centre"]
    value = -(y * (z - read).log_softmax(-1)).sum(-1).mean()
    centre = 0.9 * buffers["centre"] + 0.1 * z.detach().mean(0)
    return value, {"centre": centre, "count": buffers["count"] + 1}


def centred_stopped(z, y, buffers):
    value = -(y * (z - buffers["centre"].detach()).log_softmax(-1)).sum(-1).mean()
    return value, {"centre": 0.9 * buffers["centre"] + 0.1 * z.detach().mean(0)}


def constant(z, y, buffers):
    return -(y * (z - buffers["centre"]).log_softmax(-1)).sum(-1).mean(), buffers


def value_alone(z, y, buffers):
    value = (z - y).square().mean() + buffers["centre"].sum()
    return value, {"centre": 0.9 * buffers["centre"] + 0.1 * z.detach().mean(0)}


def unread(z, y, buffers):
    return (z - y).square().mean(), {"centre": 0.9 * buffers["centre"] + 0.1 * z.detach().mean(0)}


CENTRE = {"centre": torch.zeros(3)}
READ = {
    "centred": (centred, CENTRE),
    "late": (centred_late, CENTRE | {"count": torch.tensor(0)}),
    "stopped": (centred_stopped, CENTRE),
}
UNREAD = {"constant": (constant, CENTRE), "value alone": (value_alone, CENTRE), "unread": (unread, CENTRE)}


@every("estimator", ESTIMATORS)
@every("loss, buffers", READ)
def test_a_gradient_that_reads_changed_buffers_is_noted_with_their_names(loss, buffers, estimator):
    given = window(loss, buffers, steps=8)
    assert any("depends on the buffers (centre)" in note for note in estimator(*given).info["notes"])


@every("estimator", ESTIMATORS)
@every("loss, buffers", UNREAD)
def test_where_nothing_is_missed_nothing_is_said(loss, buffers, estimator):
    assert estimator(*window(loss, buffers)).info["notes"] == ()


def test_reversible_says_so_too():
    given = window(value_alone, CENTRE, ReversibleMomentum())
    assert reversible(*given).info["notes"] == ()
    outer = window(
        unread,
        CENTRE,
        ReversibleMomentum(),
        outer_loss=lambda carry: (carry.params["w"].sum() - carry.buffers["centre"].sum()).square(),
    )
    assert "outer loss depends on the buffers (centre)" in reversible(*outer).info["notes"][0]


@every("estimator", ESTIMATORS)
def test_an_outer_loss_that_reads_constant_buffers_misses_nothing(estimator):
    given = window(
        constant, CENTRE, outer_loss=lambda c: (c.params["w"] - c.buffers["centre"]).square().sum()
    )
    assert estimator(*given).info["notes"] == ()


@every("estimator", {"adjoint": adjoint, "autograd": autograd, "forward": forward})
def test_through_two_steps_a_gradient_misses_nothing(estimator):
    """The buffers that the second step reads come from the first parameters, which do not depend on meta."""
    assert estimator(*window(centred, CENTRE, steps=2)).info["notes"] == ()


def test_the_check_can_be_skipped_by_name():
    assert Adjoint(skip=("buffers",))(*window(centred, CENTRE)).info["notes"] == ()


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_training_mode_misses_nothing(affine, generator):
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=affine), nn.Tanh(), nn.Linear(5, 3))
    loss, params, buffers = functional.from_module(model, lambda model, x: model(x).square().mean())
    training, x = Training(loss, Momentum()), torch.randn(8, 4, generator=generator)
    meta, carry = training.init_meta(params, lr=0.1), training.init(params, buffers)
    estimate = adjoint(training, lambda carry: loss(carry.params, carry.buffers, x)[0], meta, carry, 5 * [x])
    assert estimate.info["notes"] == ()


def complex_mean(z, y, buffers):
    spectrum = torch.fft.rfft(z.mean(0))
    value = (z - y).square().mean() + (torch.fft.rfft(z.sum(0)) * buffers["mean"].conj()).real.sum()
    return value, {"mean": 0.5 * buffers["mean"] + 0.5 * spectrum.detach()}


def test_complex_buffers_are_buffers():
    given = window(complex_mean, {"mean": torch.zeros(2, dtype=torch.complex128)})
    assert "depends on the buffers (mean)" in adjoint(*given).info["notes"][0]


class ScaledGradient(torch.autograd.Function):
    """The identity, with a gradient that is scaled."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * ctx.saved_tensors[0], None


def test_a_buffer_that_the_gradient_alone_reads_is_seen():
    def loss(z, y, buffers):
        value = (ScaledGradient.apply(z, buffers["centre"].sum() + 1) - y).square().mean()
        return value, {"centre": 0.9 * buffers["centre"] + 0.1 * z.detach().mean(0)}

    assert "depends on the buffers (centre)" in " ".join(adjoint(*window(loss, CENTRE)).info["notes"])


@pytest.mark.parametrize("steps", [1, 2])
def test_windows_of_forward_that_go_on_are_looked_at(steps):
    training, outer_loss, meta, carry, batches = window(centred, CENTRE, steps=6)
    now, notes = forward.init(carry), []
    for _ in range(6 // steps):
        estimate = forward(training, outer_loss, meta, now, batches[:steps])
        now, notes = estimate.carry, [*notes, *estimate.info["notes"]]
    assert any("depends on the buffers (centre)" in note for note in notes)


def test_an_outer_loss_that_draws_is_not_said_to_depend_on_buffers():
    given = window(unread, CENTRE, outer_loss=lambda c: (c.params["w"] * torch.randn(3)).sum())
    with torch.random.fork_rng():
        assert adjoint(*given).info["notes"] == ()
