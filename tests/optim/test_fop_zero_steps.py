"""Steps of lr zero, such as torch.distributed.checkpoint takes to make state, teach nothing."""

from copy import deepcopy
from typing import Any

import torch
from optim_problems import ALL, IN_BOTH_PRECISIONS, MOMENTUM, assert_same, learned, take, task, weights
from problems import every
from torch.optim import Optimizer

from metafop.optim import FOP

ZEROS = {"number": lambda: 0.0, "tensor": lambda: torch.tensor(0.0)}


def zero_step(optimizer: Optimizer, zero: Any) -> None:
    """Step as torch.distributed.checkpoint does to make state: zero gradients, and an lr of zero."""
    old = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = zero
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, lr in zip(optimizer.param_groups, old, strict=True):
        group["lr"] = lr
    optimizer.zero_grad()


@IN_BOTH_PRECISIONS
@every("zero", ZEROS)
@every("make", ALL)
def test_the_first_step_of_zeros_makes_all_state_and_teaches_nothing(make, zero, generator):
    problem = task(generator)
    plain = deepcopy(problem)
    optimizer, other = make(problem.params, interval=1), make(plain.params, interval=1)
    zero_step(optimizer, zero())
    keys = [sorted(state) for state in optimizer.state.values()]
    group = sorted(optimizer.param_groups[0])
    assert_same(problem.params, plain.params)

    problem.train(optimizer, steps=1)
    plain.train(other, steps=1)
    assert_same(learned(optimizer), learned(other))

    problem.train(optimizer, steps=3)
    assert [sorted(state) for state in optimizer.state.values()] == keys
    assert sorted(optimizer.param_groups[0]) == group


@IN_BOTH_PRECISIONS
@every("zero", ZEROS)
@every("make", ALL)
def test_a_later_step_of_zeros_teaches_nothing_nor_does_the_next(make, zero, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=1)
    problem.train(optimizer, steps=4)
    before = learned(optimizer)
    zero_step(optimizer, zero())
    after = learned(optimizer)
    problem.train(optimizer, steps=1)
    assert_same(after, before)
    assert_same(learned(optimizer), before)

    problem.train(optimizer, steps=1)
    assert [k for k, x in learned(optimizer).items() if torch.equal(x, before[k])] == []


def test_a_step_of_lr_zero_does_not_delay_the_next_update_of_m():
    lessons = []
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        params = weights(generator, (6, 5), dtype=dtype)
        optimizer, learned = FOP(params, torch.optim.SGD, **MOMENTUM), []
        for step in range(25):
            optimizer.param_groups[0]["lr"] = 0.0 if step == 13 else 0.05
            before = optimizer.state[params[0]].get("fop_updates", 0)
            take(optimizer, params, generator)
            learned += [step] * (optimizer.state[params[0]]["fop_updates"] - before)
        lessons.append(learned)
    assert lessons == [[10, 20], [10, 20]]
