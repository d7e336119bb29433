"""Learning rates and other settings that change during training."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from optim_problems import (
    ALL,
    BASES,
    IN_BOTH_PRECISIONS,
    LEARNING,
    MOMENTUM,
    PLAIN,
    Task,
    assert_same,
    by_precision,
    kernels,
    take,
    task,
    weights,
)
from problems import assert_same_bits, every
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from metafop import SGD, Identity
from metafop.optim import FOP

SCHEDULES = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    # It cycles momentum, or beta1, too.
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=12),
}


def scheduled(problem: Task, optimizer: Any, schedule: Any) -> list[float]:
    """Return the learning rates that the scheduler has set."""
    scheduler, rates = schedule(optimizer), []
    for _ in range(10):
        problem.train(optimizer, steps=1)
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


@IN_BOTH_PRECISIONS
@every("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PLAIN)
def test_a_scheduler_sets_what_it_would_set_for_the_base(name, schedule, generator):
    problem = task(generator)
    other, third = deepcopy(problem), deepcopy(problem)
    rates = scheduled(problem, PLAIN[name](problem.params, foreach=False), schedule)
    without_p = BASES[name](other.params, preconditioner=Identity(), foreach=False)
    with_p = LEARNING[f"{name}, learned"](third.params)
    assert scheduled(other, without_p, schedule) == rates
    assert_same(other.params, problem.params)
    assert scheduled(third, with_p, schedule) == rates


@IN_BOTH_PRECISIONS
@every("schedule", SCHEDULES)
def test_a_learned_lr_multiplies_what_the_scheduler_sets(schedule, generator):
    problem = task(generator)
    weight = problem.params[-2]
    optimizer = FOP(problem.params, lr=0.05, preconditioner=Identity(), learn=("lr",), meta_lr=0.05)
    scheduler, used, expected = schedule(optimizer), [], []
    optimizer.param_groups[0]["momentum"] = 0  # OneCycleLR has set it
    for _ in range(10):
        before = weight.detach().clone()
        lr = optimizer.param_groups[0]["lr"]
        problem.train(optimizer, steps=1)
        used.append((before - weight.detach()).norm() / weight.grad.norm())
        expected.append(lr * optimizer.param_groups[0]["fop_lr_offset"].exp())
        scheduler.step()
        optimizer.param_groups[0]["momentum"] = 0
    torch.testing.assert_close(used, expected, rtol=by_precision(1e-11, 1e-5), atol=0)
    assert optimizer.param_groups[0]["fop_lr_offset"].abs().item() > 0.01


def test_diagnostics_show_a_learned_lr_and_the_group_what_was_set(generator):
    problem = task(generator)
    optimizer = FOP(problem.params, lr=0.05, learn=("precond", "lr"), meta_lr=0.05)
    group = optimizer.param_groups[0]
    assert optimizer.diagnostics()["hyper/lr/0"] == group["lr"] == 0.05
    problem.train(optimizer, steps=3)
    learned = 0.05 * group["fop_lr_offset"].exp()
    torch.testing.assert_close(optimizer.diagnostics()["hyper/lr/0"], learned, rtol=1e-12, atol=0)
    assert abs(learned - 0.05) > 1e-3
    assert group["lr"] == 0.05

    group["learn"] = ("precond",)
    assert optimizer.diagnostics()["hyper/lr/0"] == 0.05


@IN_BOTH_PRECISIONS
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@every("make", ALL)
def test_a_tensor_lr_is_read_and_never_written(make, shape, generator):
    problem = task(generator)
    lr = torch.full(shape, 0.01)
    optimizer = make(problem.params, lr=lr, interval=1)
    losses = problem.train(optimizer, steps=5)
    assert optimizer.param_groups[0]["lr"] is lr
    assert_same(lr, torch.full(shape, 0.01))
    assert losses[-1] < losses[0]


@IN_BOTH_PRECISIONS
@every(
    "make, changed",
    {
        "momentum, from nothing": (BASES["sgd"], {"momentum": 0.9}),
        "momentum, to nothing": (BASES["momentum"], {"momentum": 0.0}),
        "nesterov, from now on": (BASES["momentum"], {"nesterov": True}),
        "nesterov, no longer": (BASES["nesterov"], {"nesterov": False}),
        "dampening, from now on": (BASES["momentum"], {"dampening": 0.1}),
        "amsgrad, no longer": (partial(BASES["adamw"], amsgrad=True), {"amsgrad": False}),
        "credit": (BASES["momentum"], {"credit": "gradient"}),
        "adamw's credit": (BASES["adamw"], {"credit": "gradient"}),
        "order": (BASES["adamw"], {"order": "paper"}),
        "scale_free": (BASES["momentum"], {"scale_free": False}),
        "interval": (BASES["momentum"], {"interval": 2}),
        "learn": (BASES["momentum"], {"learn": ("precond", "lr", "momentum")}),
        "learn no more": (LEARNING["adamw, learned"], {"learn": ("precond",)}),
    },
)
def test_training_goes_on_when_a_setting_changes(make, changed, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=1)
    losses = problem.train(optimizer, steps=3)
    optimizer.param_groups[0].update(changed)
    losses += problem.train(optimizer, steps=6)
    assert losses[-1] < losses[0]


def test_p_is_credited_with_the_velocity_from_the_step_in_which_momentum_is_turned_on(generator):
    ends = []
    for warm in (True, False):
        rng = torch.Generator().manual_seed(1)
        p = kernels(torch.Generator().manual_seed(0))
        optimizer = FOP([p], lr=0.01, momentum=0.0, interval=1, meta_optimizer=SGD())
        take(optimizer, [p], rng)
        optimizer.param_groups[0]["momentum"] = 0.9
        if not warm:
            del optimizer.state[p]["fop_credit"]
        take(optimizer, [p], rng, steps=5)
        ends.append(optimizer.state[p]["fop_m0"])
    assert_same_bits(*ends)


def test_steps_that_were_taken_without_p_are_not_learned_from(generator):
    params = weights(generator, (6, 5))
    optimizer = FOP(params, torch.optim.SGD, interval=1, **MOMENTUM)
    take(optimizer, params, generator, steps=4)
    updates = optimizer.state[params[0]]["fop_updates"]
    for learn, more in ((("lr",), 0), (("precond",), 0), (("precond",), 1)):
        optimizer.param_groups[0]["learn"] = learn
        take(optimizer, params, generator)
        assert optimizer.state[params[0]]["fop_updates"] == updates + more
    u = optimizer.state[params[0]]["fop_memory"]
    assert u.norm() < 2.5 * 30**0.5  # of two gradients, not of seven


@IN_BOTH_PRECISIONS
@every("make", LEARNING)
def test_an_lr_that_is_learned_again_is_not_learned_from_the_steps_before_the_pause(make, generator):
    problem = task(generator)
    optimizer = make(problem.params)
    group, learn = optimizer.param_groups[0], optimizer.param_groups[0]["learn"]
    problem.train(optimizer, steps=3)
    group["learn"] = ("precond",)
    problem.train(optimizer, steps=2)
    updates = group["fop_lr_updates"]
    for more in (0, 1):
        group["learn"] = learn
        problem.train(optimizer, steps=1)
        assert group["fop_lr_updates"] == updates + more


@pytest.mark.parametrize("velocity", ["gone", "none"])
def test_momentum_may_be_reset_before_any_step(velocity, generator):
    params = weights(generator, (6, 5))
    optimizer = FOP(params, torch.optim.SGD, interval=4, **MOMENTUM)
    for step in range(14):
        if step in (4, 7, 9):
            optimizer.state[params[0]].pop("momentum_buffer")
        if velocity == "none":
            optimizer.state[params[0]].setdefault("momentum_buffer", None)
        take(optimizer, params, generator)
    assert optimizer.state[params[0]]["fop_updates"] >= 2
    assert params[0].isfinite().all()
