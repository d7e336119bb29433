"""A leaf whose derivative is hidden gets a note with its name; one that is stopped, or has kinks, none."""

import pytest
import torch
from problems import assert_near, every
from torch.nn import functional as F

from metafop import Adam, Momentum, Online, Training, functional
from metafop.hypergradients import (
    Adjoint,
    Forward,
    Truncated,
    adjoint,
    autograd,
    forward,
    implicit,
    reversible,
)
from metafop.optimizers import ReversibleMomentum

ESTIMATORS = {
    "adjoint": adjoint,
    "over forward": Adjoint(over="forward"),
    "autograd": autograd,
    "forward": Forward(("loss",)),
    "one window": Truncated(3),
}


class Square(torch.autograd.Function):
    """Its backward leaves out a factor of two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * ctx.saved_tensors[0]


def stopped(leaf):
    with torch.no_grad():
        return leaf.square()


# The loss of what is predicted, z, given a leaf.
HIDDEN = {
    "a number": lambda z, leaf: leaf * leaf.item() * z.tanh().square().mean(),
    "a number in a tensor": lambda z, leaf: leaf * torch.tensor(leaf.item()) * z.tanh().square().mean(),
    "a setting": lambda z, leaf: F.leaky_relu(z - leaf, leaf.detach().item()).square().mean(),
    "a wrong backward": lambda z, leaf: Square.apply(leaf) * z.tanh().square().mean(),
}
RIGHT = {
    "a product": lambda z, leaf: leaf * leaf * z.tanh().square().mean(),
    "a power": lambda z, leaf: z.abs().pow(leaf + 1).mean(),
    "stopped": lambda z, leaf: leaf * leaf.detach() * z.tanh().square().mean(),
    "without grad": lambda z, leaf: stopped(leaf) * z.tanh().square().mean(),
    "a ramp": lambda z, leaf: F.relu(z - leaf).square().mean(),
    "a clamp": lambda z, leaf: z.clamp(-leaf, leaf).square().mean(),
    "rounded": lambda z, leaf: ((z / leaf).round() * leaf - 1).square().mean() + leaf * z.square().mean(),
    "rounded itself": lambda z, leaf: (leaf + leaf.round()) * z.square().mean(),
    "a choice": lambda z, leaf: leaf * torch.where(z > leaf, z, 0.0).square().mean(),
}


def regression(loss, optimizer=None):
    """Return what an estimator takes: three steps of a small regression with a leaf."""
    rng = torch.Generator().manual_seed(0)
    training = Training(
        functional.plain(lambda params, x, leaf: loss(x @ params["w"], leaf)), optimizer or Momentum()
    )
    params, batches = {"w": torch.randn(3, generator=rng)}, list(torch.randn(3, 8, 3, generator=rng))
    meta = training.init_meta(params, lr=0.2, momentum=0.5, loss=0.3)
    return training, lambda carry: carry.params["w"].square().sum(), meta, training.init(params), batches


def slope(window, h=1e-6):
    """Return the derivative in the leaf by central differences of whole runs."""
    training, outer_loss, meta, start, batches = window

    def run(leaf):
        carry = start
        for batch in batches:
            carry, _ = training.step(meta._replace(loss=leaf), carry, batch)
        return outer_loss(carry)

    return (run(meta.loss + h) - run(meta.loss - h)) / (2 * h)


@every("estimator", ESTIMATORS)
@every("loss", HIDDEN)
def test_what_is_hidden_is_noted_with_the_leaf(loss, estimator):
    window = regression(loss)
    estimate = estimator(*window)
    (note,) = [note for note in estimate.info["notes"] if "hides a derivative" in note]
    assert "in its leaf loss" in note
    assert abs(estimate.grads.loss - slope(window)) > 1e-2 * abs(slope(window))


@every("estimator", ESTIMATORS)
@every("loss", RIGHT)
def test_what_is_right_is_not(loss, estimator):
    window = regression(loss)
    estimate = estimator(*window)
    assert_near(estimate.grads.loss, slope(window), rtol=1e-6, size=1e-6)
    assert [note for note in estimate.info["notes"] if "Zeros stand" not in note] == []


@every("loss", {"hidden": HIDDEN["a number"], "right": RIGHT["a product"]})
def test_undone_steps_and_minima_look_too(loss):
    for estimator, optimizer in ((reversible, ReversibleMomentum()), (implicit, Momentum())):
        found = estimator(*regression(lambda z, leaf: loss(z, leaf) + z.square().mean(), optimizer)).info[
            "notes"
        ]
        assert any("in its leaf loss" in note for note in found) == (loss is HIDDEN["a number"])


def test_a_learner_says_it_where_it_starts(caplog):
    training, _, meta, carry, batches = regression(HIDDEN["a number"])
    with caplog.at_level("WARNING", logger="metafop"):
        Online(training, Adam(), ("loss",)).init(meta, carry, batches[0])
    assert "in its leaf loss" in caplog.text


def test_the_check_can_be_skipped_by_name():
    assert Adjoint(skip=("hessian",))(*regression(HIDDEN["a number"])).info["notes"] == ()


def test_of_many_leaves_the_one_is_named():
    training, outer_loss, _, carry, batches = regression(HIDDEN["a number"])

    def loss(params, x, leaves):
        return leaves["a"] * (x @ params["w"]).square().mean() + HIDDEN["a number"](
            x @ params["w"], leaves["b"]
        )

    training = Training(functional.plain(loss), training.optimizer)
    meta = training.init_meta(carry.params, lr=0.2, loss={"a": 0.1, "b": 0.3})
    (note,) = adjoint(training, outer_loss, meta, carry, batches).info["notes"]
    assert "in its leaf loss.b:" in note


@pytest.mark.parametrize("batch", [1, 2])
def test_a_leaf_that_a_later_batch_uses_is_used(batch):
    training, outer_loss, _, carry, batches = regression(RIGHT["a product"])
    batches[batch] = batches[batch][:4]

    def loss(params, x, leaf):
        return (x @ params["w"]).square().mean() * (leaf if len(x) == 4 else 1.0)

    training = Training(functional.plain(loss), training.optimizer)
    meta = training.init_meta(carry.params, lr=0.2, loss=0.3)
    window = training, outer_loss, meta, carry, batches
    for estimator in (adjoint, autograd, forward):
        assert_near(estimator(*window).grads.loss, slope(window), rtol=1e-6)
