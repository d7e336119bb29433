"""A step that comes out different when it is taken again is refused with its number, never differentiated."""

import itertools
from functools import partial

import pytest
import torch
from problems import assert_same_bits, convnet, every
from torch import nn

from metafop import Momentum, Training, functional
from metafop.hypergradients import (
    Adjoint,
    Autograd,
    Forward,
    Implicit,
    Neumann,
    ReversibleAdjoint,
    Truncated,
    adjoint,
    autograd,
    forward,
    implicit,
    reversible,
)
from metafop.hypergradients.checks.repeat import rounding
from metafop.optimizers import ReversibleMomentum

ESTIMATORS = {
    "adjoint": adjoint,
    "log": Adjoint("log"),
    "forward over reverse": Adjoint(over="forward"),
    "autograd": autograd,
    "forward": forward,
    "truncated": Truncated(3),
    "truncated forward": Truncated(3, forward),
    "reversible": reversible,
}


def unroll(loss, estimator, batches=None, steps=6):
    """The hypergradient of a small regression whose loss is `loss(prediction, target)`."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=rng), torch.randn(8, 2, generator=rng)
    optimizer = ReversibleMomentum() if estimator is reversible else Momentum()
    training = Training(functional.plain(lambda params, batch: loss(batch @ params["w"], y)), optimizer)
    params = {"w": torch.randn(4, 2, generator=rng)}
    meta = training.init_meta(params, lr=0.1, momentum=0.5)
    given = batches(x) if batches else steps * [x]
    return estimator(
        training, lambda carry: carry.params["w"].square().sum(), meta, training.init(params), given
    )


def squared(z, y):
    return (z.tanh() - y).square().mean()


def counting():
    calls = itertools.count()
    return lambda z, y: squared(z, y) * (1 + 0.1 * (next(calls) % 17))


class Switched(nn.Module):
    """Scales by two in training mode, which it leaves when it is called."""

    def forward(self, x):
        x = 2 * x if self.training else x
        self.train(not self.training)
        return x


def switching():
    module = Switched()
    return lambda z, y: squared(module(z), y)


def noisy_gradient():
    def loss(z, y):
        z = z.tanh()
        if z.requires_grad:
            z.register_hook(lambda g: g + torch.randn_like(g))
        return (z - y).square().mean()

    return loss


CHANGING = {
    "dropout": lambda: lambda z, y: squared(torch.dropout(z, 0.5, True), y),
    "noise": lambda: lambda z, y: squared(z + 0.1 * torch.randn_like(z), y),
    "a counter": counting,
    "a mode that changes": switching,
    "noise in the gradient": noisy_gradient,
}


class Augmented:
    """Batches that are others whenever they are asked."""

    def __init__(self, x):
        self.x, self.asked = x, itertools.count()

    def __len__(self):
        return 6

    def __getitem__(self, t):
        return self.x * (1 + 0.01 * next(self.asked))


@every("estimator", ESTIMATORS)
@every("make", CHANGING)
def test_a_loss_that_changes_from_call_to_call_is_refused(make, estimator):
    with pytest.raises((ArithmeticError, NotImplementedError)) as refused:
        unroll(make(), estimator)
    assert "taken again" in str(refused.value)
    assert "seeded=True" in str(refused.value)


@every("estimator", ESTIMATORS)
def test_batches_that_change_from_call_to_call_are_refused(estimator):
    with pytest.raises(ArithmeticError, match="batches that augment in __getitem__"):
        unroll(squared, estimator, Augmented)


@every("estimator", {"adjoint": adjoint, "log": Adjoint("log"), "reversible": reversible})
def test_the_step_that_changed_is_named(estimator):
    """The batch of step 3 alone is another when it is asked again."""

    class Third:
        def __init__(self, x):
            self.x, self.asked = x, 0

        def __len__(self):
            return 6

        def __getitem__(self, t):
            self.asked += t == 3
            return self.x * (1.01 if t == 3 and self.asked > 1 else 1.0)

    with pytest.raises(ArithmeticError, match="loss of step 3 comes out different"):
        unroll(squared, estimator, Third)


@every("estimator", {each.__name__: each(skip=("repeat",)) for each in (Adjoint, Autograd, Forward)})
def test_the_check_can_be_skipped_by_name(estimator):
    assert unroll(counting(), estimator).grads.hyper.lr.isfinite()


@every("estimator", ESTIMATORS)
def test_a_loss_that_is_not_a_number_is_the_same_as_itself(estimator):
    """Not finite is another matter, and a note."""
    estimate = unroll(lambda z, y: squared(z, y) * torch.nan, estimator)
    assert "not finite" in " ".join(estimate.info["notes"])


def noise_on_a_leaf():
    return lambda z, y, leaf: squared(z, y) + (leaf * torch.rand(2) * z).mean()


def counting_with_a_leaf():
    calls = itertools.count()
    return lambda z, y, leaf: squared(z, y) * (1 + leaf * (next(calls) % 17))


def noise_in_the_gradient_of_a_leaf():
    noise = noisy_gradient()
    return lambda z, y, leaf: leaf * noise(z, y)


class Moving:
    """Batches that are the same, and move a leaf when they are asked."""

    def __init__(self, x, leaf, when=lambda call: True):
        self.x, self.leaf, self.when, self.asked = x, leaf, when, itertools.count()

    def __len__(self):
        return 6

    def __getitem__(self, t):
        if self.when(next(self.asked)):
            self.leaf.add_(1e-3)
        return self.x


def unroll_with_a_leaf(loss, estimator, batches=None):
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 4, generator=rng), torch.randn(8, 2, generator=rng)
    optimizer = ReversibleMomentum() if estimator is reversible else Momentum()

    def of(params, batch, leaf):
        return loss(batch @ params["w"], y, leaf) + leaf.square() * params["w"].square().sum()

    training, params = Training(functional.plain(of), optimizer), {"w": torch.randn(4, 2, generator=rng)}
    meta = training.init_meta(params, lr=0.1, momentum=0.5, loss=0.3)
    given = batches(x, meta.loss) if batches else 6 * [x]
    return estimator(
        training, lambda carry: carry.params["w"].square().sum(), meta, training.init(params), given
    )


WITH_LEAVES = ESTIMATORS | {"implicit": implicit, "implicit, by Neumann": Implicit(Neumann())}


@every("estimator", WITH_LEAVES)
@every(
    "make", {f.__name__: f for f in (noise_on_a_leaf, counting_with_a_leaf, noise_in_the_gradient_of_a_leaf)}
)
def test_what_changes_with_a_leaf_is_refused(make, estimator):
    with pytest.raises((ArithmeticError, NotImplementedError), match="taken again"):
        unroll_with_a_leaf(make(), estimator)


@every("estimator", {k: e for k, e in WITH_LEAVES.items() if e is not autograd})
@every("when", {"whenever": lambda call: True, "once": lambda call: call == 6})
def test_a_leaf_that_is_moved_in_between_is_refused(when, estimator):
    """The whole graph refuses it as what torch.func cannot follow."""
    with pytest.raises(ArithmeticError, match="taken again"):
        unroll_with_a_leaf(lambda z, y, leaf: leaf * squared(z, y), estimator, partial(Moving, when=when))


@every("estimator", WITH_LEAVES)
def test_what_does_not_change_with_a_leaf_passes(estimator):
    estimate = unroll_with_a_leaf(lambda z, y, leaf: leaf * squared(z, y), estimator)
    assert estimate.grads.loss.isfinite()


def test_a_module_that_is_pure_passes_on_every_path(generator):
    problem = convnet(generator)
    training = problem.training(Momentum())
    meta = training.init_meta(problem.params, lr=0.1)
    *batches, last = problem.batches
    window = (
        training,
        lambda carry: problem.loss(carry.params, carry.buffers, last)[0],
        meta,
        training.init(problem.params, problem.buffers),
        batches,
    )
    checked, unchecked = adjoint(*window), Adjoint(skip=("repeat", "hessian", "buffers"))(*window)
    assert_same_bits(checked.grads, unchecked.grads)
    assert checked.info["notes"] == ()


def test_inside_vmap_too():
    calls = itertools.count()

    def loss(params, batch):
        return (params["w"] - batch).square().sum() * (1 + 0.1 * next(calls))

    training, params = Training(functional.plain(loss), Momentum()), {"w": torch.zeros(2)}
    meta, carry = training.init_meta(params, lr=0.1), training.init(params)

    def estimate(lr):
        changed = meta._replace(hyper=meta.hyper._replace(lr=lr))
        return adjoint(
            training, lambda carry: carry.params["w"].sum(), changed, carry, 3 * [torch.ones(2)]
        ).grads

    with pytest.raises(ArithmeticError, match="comes out different"):
        torch.func.vmap(estimate)(torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("skip", ["repeat", ("no such check",), ["repeat"]], ids=repr)
@every(
    "make",
    {"Adjoint": Adjoint, "Autograd": Autograd, "Forward": Forward, "ReversibleAdjoint": ReversibleAdjoint},
)
def test_a_check_that_there_is_not_is_refused(make, skip):
    with pytest.raises(ValueError, match="skips a tuple of checks out of"):
        make(skip=skip)


def test_between_kernels_a_loss_may_differ_by_its_own_rounding():
    """One large loss does not excuse the others."""
    slack = rounding(list(torch.tensor([1e5, 0.1, 1e-9], dtype=torch.float32)))
    assert slack == pytest.approx([34.5, 4.6e-5, 1.2e-5], rel=0.05)
    assert rounding([torch.tensor(1e-20)]) == pytest.approx([1.5e-28], rel=0.05)
