"""Every group has its own settings, and every parameter its own time."""

from copy import deepcopy

import pytest
import torch
from optim_problems import ALL, BASES, IN_BOTH_PRECISIONS, assert_same, kept, kernels, quadratic, take, task
from problems import assert_same_bits, every
from torch import nn

from metafop import Dense, Diagonal, Scalar
from metafop.optim import FOP


def test_settings_differ_by_group(generator):
    kernels, matrix = torch.randn(4, 2, 3, 3, generator=generator), torch.randn(3, 4, generator=generator)
    params = [nn.Parameter(kernels), nn.Parameter(matrix)]
    groups = [
        {"params": params[:1], "preconditioner": Scalar(), "meta_lr": 0.1, "interval": 1},
        {"params": params[1:], "meta_lr": 0.0, "interval": 1},
    ]
    optimizer = FOP(groups, torch.optim.SGD, lr=0.1, preconditioner=Dense())
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.state[params[0]]["fop_m0"] > 1
    assert_same_bits(optimizer.state[params[1]]["fop_m0"], torch.eye(4))


@IN_BOTH_PRECISIONS
@every("make", ALL)
def test_a_group_added_later_is_trained_and_changes_no_other(make, generator):
    one, late, alone = (nn.Parameter(x) for x in torch.randn(3, 4, 3, generator=generator))
    alone.data.copy_(one.data)
    optimizer, single = make([one], interval=1), make([alone], interval=1)
    quadratic([one], optimizer, steps=3)
    size = late.norm().item()
    optimizer.add_param_group({"params": [late], "lr": 0.01, "meta_lr": 0.1})
    quadratic([one, late], optimizer, steps=5)
    quadratic([alone], single, steps=8)
    assert late.norm().item() < size
    assert_same((one, optimizer.state[one]), (alone, single.state[alone]))


@IN_BOTH_PRECISIONS
def test_a_group_that_is_refused_is_not_added(generator):
    problem = task(generator)
    optimizer = FOP(problem.params)
    before = kept(optimizer)
    with pytest.raises(ValueError, match="order"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "order": "none"})
    assert_same(kept(optimizer), before)


def test_a_parameter_that_was_put_into_a_group_by_hand_is_refused(generator):
    p, other = kernels(generator), kernels(generator)
    optimizer = FOP([p], lr=0.1)
    optimizer.param_groups[0]["params"].append(other)
    with pytest.raises(RuntimeError, match=r"Group 0 holds a parameter .* add_param_group"):
        take(optimizer, [p], generator)


@IN_BOTH_PRECISIONS
@every("make", ALL)
def test_groups_without_parameters_change_nothing(make, generator):
    problem = task(generator)
    other = deepcopy(problem)
    groups = [{"params": []}, {"params": problem.params}, {"params": []}]
    problem.train(make(groups, interval=1), steps=4)
    other.train(make(other.params, interval=1), steps=4)
    assert_same(problem.params, other.params)


@IN_BOTH_PRECISIONS
@every("make", ALL)
def test_a_first_parameter_without_numbers_changes_nothing(make, generator):
    problem = task(generator)
    other, empty = deepcopy(problem), nn.Parameter(torch.empty(0, 3))
    empty.grad = torch.empty(0, 3)
    problem.train(make([empty, *problem.params], preconditioner="pp-hd", interval=1), steps=4)
    other.train(make(other.params, preconditioner="pp-hd", interval=1), steps=4)
    assert_same(problem.params, other.params)


@every("make", ALL)
def test_an_optimizer_without_parameters_steps(make):
    optimizer = make([{"params": []}])
    optimizer.step()
    assert not optimizer.state
    assert "hyper/lr/0" in optimizer.diagnostics()


def test_groups_that_were_passed_once_can_be_passed_again(generator):
    groups = [{"params": [kernels(generator)], "preconditioner": Diagonal()}]
    first, second = FOP(groups, lr=0.1), FOP(groups, lr=0.1)
    assert first.param_groups[0]["preconditioner"] == second.param_groups[0]["preconditioner"] == "Diagonal()"


def test_what_is_learned_of_lr_and_momentum_is_seen_by_group(generator):
    params = [kernels(generator), kernels(generator)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, (0.1, 0.2), strict=True)]
    optimizer = FOP(groups, momentum=0.9, learn=("lr", "momentum"), meta_lr=0.1)
    take(optimizer, params, generator, steps=3)
    shown = optimizer.diagnostics()
    assert shown.keys() == {"hyper/lr/0", "hyper/lr/1", "hyper/momentum/0", "hyper/momentum/1"}
    assert abs(shown["hyper/lr/1"] - 0.2) > 1e-3


@IN_BOTH_PRECISIONS
@every("make", BASES)
def test_a_parameter_without_a_gradient_stays_while_others_are_trained(make, generator):
    one, other, alone = (nn.Parameter(x) for x in torch.randn(3, 4, 3, generator=generator))
    alone.data.copy_(one.data)
    optimizer, single = make([one, other], interval=1), make([alone], interval=1)
    quadratic([one, other], optimizer, steps=3)
    other.grad = None
    value, state = deepcopy((other.data, optimizer.state[other]))
    quadratic([one], optimizer, steps=3)
    assert_same((other.data, optimizer.state[other]), (value, state))

    quadratic([one, other], optimizer, steps=3)
    quadratic([alone], single, steps=9)
    assert_same((one, optimizer.state[one]), (alone, single.state[alone]))
    assert not torch.equal(optimizer.state[other]["fop_m0"], state["fop_m0"])


@pytest.mark.parametrize("interval", [1, 2, 10])
def test_parameters_whose_gradients_alternate_are_learned_too(interval, generator):
    heads = [kernels(generator), kernels(generator)]
    optimizer = FOP(heads, lr=0.1, momentum=0.9, interval=interval)
    for step in range(100):
        take(optimizer, [heads[step % 2]], generator)
        heads[step % 2].grad = None
    updates = [optimizer.state[p]["fop_updates"] for p in heads]
    assert min(updates) >= 49 // max(interval, 2) - 1
