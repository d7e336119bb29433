"""A step that fails changes nothing, and can be repeated."""

from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import pytest
import torch
from optim_problems import (
    ALL,
    BASES,
    IN_BOTH_PRECISIONS,
    MOMENTUM,
    Descent,
    assert_same,
    kept,
    take,
    task,
    weights,
)
from problems import assert_same_bits, every
from torch import nn

from metafop import Adam, Dense, Diagonal, Momentum, Rescaled
from metafop.optim import FOP
from metafop.optim.meta_update import Leaf, MetaOptimizer

AGING = Rescaled(Rescaled(Diagonal(), limit=2.0), limit=0.5)
FAILING = ALL | {
    "adamw, gradient credit": partial(BASES["adamw"], credit="gradient"),
    "paper": partial(BASES["momentum"], preset="paper"),
    "rescaled": partial(
        BASES["momentum"], preconditioner=Rescaled(Rescaled(Diagonal(), limit=2.0), limit=0.5)
    ),
    "from elsewhere": partial(FOP, optimizer_class=Descent),
}


def fail(*_: Any) -> None:
    raise ArithmeticError("the base has failed")


@IN_BOTH_PRECISIONS
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("interval", [1, 3])
@every("make", FAILING)
def test_a_step_whose_base_failed_changes_nothing_and_can_be_repeated(
    make, interval, steps, generator, monkeypatch
):
    problem = task(generator)
    other = deepcopy(problem)
    own_step = {} if make.keywords["optimizer_class"] is Descent else {"foreach": False}  # for it to fail
    make = partial(make, interval=interval, **own_step)
    optimizer, plain = make(problem.params), make(other.params)
    problem.train(optimizer, steps=steps)
    other.train(plain, steps=steps)
    problem.backward()
    before, grads = kept(optimizer), [id(p.grad) for p in problem.params]
    with monkeypatch.context() as patch:
        patch.setattr(make.keywords["optimizer_class"], "step", wraps(fail)(lambda *args: fail(*args)))
        with pytest.raises(ArithmeticError, match="the base has failed"):
            optimizer.step()
    assert_same(kept(optimizer), before)
    assert [id(p.grad) for p in problem.params] == grads

    problem.train(optimizer, steps=4)
    other.train(plain, steps=4)
    assert_same(kept(optimizer), kept(plain))


@IN_BOTH_PRECISIONS
def test_the_time_of_a_family_counts_the_steps_that_are_learned_from(generator):
    problem = task(generator)
    optimizer = FAILING["rescaled"](problem.params, interval=1)
    problem.train(optimizer, steps=4)
    for m in optimizer.inspect()[1].precond.values():
        assert m.time == m.inner.time == 4  # it starts at 1, and the first step is not learned from


@dataclass(frozen=True)
class Failing(Dense):
    """A family that fails when it is told to."""

    told: list = field(default_factory=list, hash=False)

    def apply(self, m, grad):
        if self.told:
            raise ArithmeticError("it was told to")
        return super().apply(m, grad)


def test_a_step_that_fails_after_learning_can_be_repeated(generator):
    params, told = weights(generator, (6, 5), (4, 4)), []
    groups = [{"params": params[:1]}, {"params": params[1:], "preconditioner": Failing(told)}]
    optimizer = FOP(groups, torch.optim.SGD, preconditioner=Dense(), interval=2, **MOMENTUM)
    take(optimizer, params, generator, steps=4)
    before = deepcopy(optimizer.state_dict())
    told.append(True)
    with pytest.raises(ArithmeticError, match="told to"):
        optimizer.step()
    assert_same(optimizer.state_dict(), before)
    told.clear()
    optimizer.step()
    assert optimizer.state[params[0]]["fop_updates"] == before["state"][0]["fop_updates"] + 1


@dataclass(frozen=True)
class Half(Diagonal):
    """A family with a slip: what it returns is not like the gradient."""

    def apply(self, m, grad):
        return (m * grad)[: len(grad) // 2]


def test_a_direction_that_is_not_like_the_gradient_is_refused_and_nothing_changes(generator):
    params = weights(generator, (4, 3))
    before = [p.detach().clone() for p in params]
    optimizer = FOP(params, torch.optim.SGD, preconditioner=Half(), **MOMENTUM)
    with pytest.raises(RuntimeError, match=r"Half\(\) of '0' makes torch.float32, \(2, 3\), of a gradient"):
        take(optimizer, params, generator)
    assert_same_bits([p.detach() for p in params], before)
    assert not optimizer.state


@IN_BOTH_PRECISIONS
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("shape", [(7, 5), (5, 6)], ids=str)
@every("make", ALL)
def test_a_parameter_whose_shape_has_changed_is_refused_and_nothing_changes(make, shape, steps, generator):
    weight = nn.Parameter(torch.randn(6, 5, generator=generator))
    optimizer = make([("w", weight)], interval=10)
    take(optimizer, [weight], generator, steps)
    weight.data = torch.ones(shape)
    weight.grad = torch.ones(shape)
    before = kept(optimizer)
    with pytest.raises(RuntimeError, match=r"'w' had the shape \(6, 5\) .*, and has .* now\. Make a new FOP"):
        optimizer.step()
    assert_same(kept(optimizer), before)


@IN_BOTH_PRECISIONS
def test_a_sparse_gradient_is_refused_and_nothing_changes(generator):
    first = nn.Parameter(torch.randn(2, 3, generator=generator))
    layer = nn.Embedding(4, 3, sparse=True)
    optimizer = FOP([("first", first), ("embedding", layer.weight)], lr=0.1)
    (first.sum() + layer(torch.tensor([1, 2])).sum()).backward()
    before = kept(optimizer)
    with pytest.raises(RuntimeError, match=r"dense gradients.*sparse.*'embedding'"):
        optimizer.step()
    assert_same(kept(optimizer), before)


@pytest.mark.parametrize("optimizer", [Adam(), Momentum()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_m_stays_where_it_is_if_any_hypergradient_is_not_finite(dtype, optimizer, generator):
    values = [torch.randn(3, 4, generator=generator, dtype=dtype), torch.ones(2, dtype=dtype)]
    meta = MetaOptimizer(optimizer)
    leaves = [Leaf(v, meta.init(v)) for v in values]
    wrong = [torch.full((3, 4), torch.inf, dtype=dtype), torch.ones(2, dtype=dtype)]
    leaves = meta.update(0.1, leaves, wrong)
    assert_same_bits([leaf.value for leaf in leaves], values)
    leaves = meta.update(0.1, leaves, [torch.ones(3, 4, dtype=dtype), torch.ones(2, dtype=dtype)])
    assert leaves[0].value.isfinite().all()
    assert (leaves[1].value < 1).all()
