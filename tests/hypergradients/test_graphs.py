"""Outside transforms no graph outlives its step, and nothing outlives its training."""

import gc
import weakref
from typing import Any

import pytest
import torch
from problems import ALL_MODELS, every
from torch import nn

from metafop import Adam, Momentum, Online, Training, functional, tree
from metafop.hypergradients import Adjoint, Forward, Truncated, adjoint, autograd, reversible
from metafop.optimizers import ReversibleMomentum

ESTIMATORS = {
    "adjoint": adjoint,
    "sqrt": Adjoint("sqrt"),
    "forward over reverse": Adjoint(over="forward"),
    "truncated": Truncated(2),
    "forward": Forward(("lr",)),
    "autograd": autograd,
    "reversible": reversible,
}

NORMS = {
    "batch norm": lambda: nn.BatchNorm2d(3),
    "instance norm": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    "group norm": lambda: nn.GroupNorm(1, 3),
}


def normed(make, estimator, steps=4):
    """An unroll of a net with a norm in training mode."""
    rng = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), make(), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    loss, params, buffers = functional.from_module(model, lambda model, x: model(x).square().mean())
    optimizer = ReversibleMomentum() if estimator is reversible else Momentum()
    training, x = Training(loss, optimizer), torch.randn(6, 2, 4, 4, generator=rng)
    meta = training.init_meta(params, lr=0.1, momentum=0.5)
    carry = training.init(params, buffers)
    return training, lambda c: loss(c.params, c.buffers, x)[0], meta, carry, steps * [x]


def tensors(estimate):
    return [x for x in tree.leaves(tuple(estimate)) if isinstance(x, torch.Tensor)]


@every("estimator", ESTIMATORS)
@every("make", NORMS)
def test_an_estimate_holds_no_graph(make, estimator):
    assert not any(x.requires_grad for x in tensors(estimator(*normed(make, estimator))))


@every("estimator", {k: v for k, v in ESTIMATORS.items() if k not in ("autograd", "reversible")})
@every("make", NORMS)
def test_an_estimate_inside_vmap_holds_no_graph(make, estimator):
    training, outer_loss, meta, carry, batches = normed(make, estimator)

    def grads(lr):
        changed = meta._replace(hyper=meta.hyper._replace(lr=lr))
        return estimator(training, outer_loss, changed, carry, batches).grads

    assert not any(x.requires_grad for x in tree.leaves(torch.func.vmap(grads)(torch.tensor([0.1, 0.2]))))


@every("make", NORMS)
def test_no_graph_is_held_between_the_steps_of_a_backward_pass(make, monkeypatch):
    """λ, which goes from step to step, would hold the graphs of all of them."""
    from metafop.hypergradients.steps import RecordedSteps

    returned = []
    backward = RecordedSteps.backward

    def watched(*arguments):
        result = backward(*arguments)
        returned.extend(x for x in tree.leaves(result[:2]))
        return result

    monkeypatch.setattr(RecordedSteps, "backward", watched)
    adjoint(*normed(make, adjoint))
    assert returned
    assert not any(x.requires_grad for x in returned)


def closed_over(estimator):
    rng = torch.Generator().manual_seed(0)
    teacher = nn.Linear(4, 2)
    x, params = torch.randn(6, 4, generator=rng), {"w": torch.randn(4, 2, generator=rng)}
    loss = functional.plain(lambda params, x: (teacher(x) - (x @ params["w"]).tanh()).square().mean())
    optimizer = ReversibleMomentum() if estimator is reversible else Momentum()
    training = Training(loss, optimizer)
    meta = training.init_meta(params, lr=0.1, momentum=0.5)
    return training, lambda c: loss(c.params, {}, x)[0], meta, training.init(params), 4 * [x]


@every("estimator", ESTIMATORS)
def test_what_a_loss_closes_over_leaves_no_graph(estimator):
    assert not any(x.requires_grad for x in tensors(estimator(*closed_over(estimator))))


@every("estimator", {k: v for k, v in ESTIMATORS.items() if k not in ("autograd", "reversible")})
def test_nor_does_it_inside_vmap(estimator):
    training, outer_loss, meta, carry, batches = closed_over(estimator)

    def after(lr):
        changed = meta._replace(hyper=meta.hyper._replace(lr=lr))
        estimate = estimator(training, outer_loss, changed, carry, batches)
        return estimate.grads, estimate.carry

    found = torch.func.vmap(after)(torch.tensor([0.1, 0.2]))
    assert not any(x.requires_grad for x in tree.leaves(found))


def test_a_training_with_slots_is_differentiated_too():
    """What cannot be referred to weakly is not kept in mind."""

    class Slotted:
        __slots__ = ("training",)

        def __init__(self, training: Any) -> None:
            self.training = training

        def __getattr__(self, name: str) -> Any:
            return getattr(self.training, name)

    training, outer_loss, meta, carry, batches = closed_over(adjoint)
    slotted_and_not: list[Any] = [Slotted(training), training]
    found, expected = (adjoint(each, outer_loss, meta, carry, batches) for each in slotted_and_not)
    torch.testing.assert_close(found.grads, expected.grads, rtol=0, atol=0)


def test_nor_does_it_in_plain_steps_or_online():
    training, _, meta, carry, (x, *_) = closed_over(adjoint)
    after, info = training.step(meta, carry, x)
    assert not any(leaf.requires_grad for leaf in tree.leaves((after, info)))
    online = Online(training, Adam(), ("lr",))
    outer_meta, state = online.init_meta(meta, lr=0.1), online.init(meta, carry)
    for _ in range(3):
        state, _ = online.step(outer_meta, state, x)
    assert not any(leaf.requires_grad for leaf in tree.leaves(state))


def test_torch_autograd_still_goes_through_steps_of_what_requires_a_gradient():
    training, outer_loss, meta, carry, (x, *_) = closed_over(adjoint)
    lr = meta.hyper.lr.clone().requires_grad_()
    now = carry
    for _ in range(4):
        now, _ = training.step(meta._replace(hyper=meta.hyper._replace(lr=lr)), now, x)
    (derivative,) = torch.autograd.grad(outer_loss(now), lr)
    expected = adjoint(training, outer_loss, meta, carry, 4 * [x]).grads.hyper.lr
    torch.testing.assert_close(derivative, expected)


@every("make", ALL_MODELS)
def test_a_training_and_its_data_are_let_go(make, generator):
    problem = make(generator)
    training = problem.training(Momentum())
    meta = training.init_meta(problem.params, lr=0.1)
    carry = training.init(problem.params, problem.buffers)
    estimate = adjoint(
        training,
        lambda c: torch.stack([p.sum() for p in c.params.values()]).sum(),
        meta,
        carry,
        problem.batches,
    )
    alive = weakref.ref(training)
    del training, problem, estimate
    gc.collect()
    assert alive() is None


def test_a_compiled_training_and_its_data_are_let_go(generator):
    params = {"w": torch.randn(4, 2, generator=generator)}
    data = torch.randn(6, 4, generator=generator)

    def loss(params, _, data=data):
        return (data @ params["w"]).tanh().square().mean()

    training = Training(functional.plain(loss), Momentum())
    meta, carry = training.init_meta(params, lr=0.1), training.init(params)
    estimator, outer_loss = Adjoint(compile=True), lambda carry: carry.params["w"].sum()
    first = estimator(training, outer_loss, meta, carry, 2 * [None])
    torch.testing.assert_close(estimator(training, outer_loss, meta, carry, 2 * [None]), first)
    alive = weakref.ref(training), weakref.ref(data)
    del training, data, loss
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_a_loss_that_ignores_its_parameters_is_refused():
    module = nn.Linear(4, 2)
    training = Training(functional.plain(lambda params, x: module(x).square().mean()), Momentum())
    params = {k: p.detach() for k, p in module.named_parameters()}
    meta, carry, x = training.init_meta(params, lr=0.1), training.init(params), torch.ones(3, 4)
    for call in (
        lambda: training.step(meta, carry, x),
        lambda: adjoint(training, lambda c: c.params["weight"].sum(), meta, carry, [x]),
    ):
        with pytest.raises(ValueError, match="does not depend on the parameters that it is given"):
            call()


def test_a_loss_that_writes_into_its_parameters_is_refused_and_they_are_named():
    def renormed(params, batch):
        return nn.functional.embedding(batch, params["w"], max_norm=0.1).square().sum()

    def decayed(params, batch):
        with torch.no_grad():
            params["w"].mul_(0.9)
        return params["w"].square().sum()

    for loss in (renormed, decayed):
        params = {"w": torch.ones(4, 2)}
        training = Training(functional.plain(loss), Momentum())
        meta, carry = training.init_meta(params, lr=0.1), training.init(params)
        with pytest.raises(ValueError, match="The loss writes into the parameter 'w'"):
            training.step(meta, carry, torch.tensor([0, 1]))
