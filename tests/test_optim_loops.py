"""What people do in training loops around an optimizer: schedules, accumulation, layouts, any base."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from optim_problems import (
    ALL,
    BASES,
    LEARNING,
    PLAIN,
    Descent,
    Task,
    assert_same,
    by_precision,
    learned,
    task,
)
from problems import every, filled
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from metafop import Identity
from metafop.optim import FOP

pytestmark = pytest.mark.usefixtures("precision")


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


@every("make", ALL)
def test_gradients_set_to_zero_or_to_none_train_alike(make, generator):
    to_none = task(generator)
    to_zero = deepcopy(to_none)
    for problem, set_to_none in ((to_none, True), (to_zero, False)):
        optimizer = make(problem.params, interval=1)
        for _ in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            problem.loss().backward()
            optimizer.step()
    assert_same(to_zero.params, to_none.params)


@every("make", ALL)
def test_accumulated_and_clipped_gradients_are_taken_as_they_are(make, generator):
    problem = task(generator)
    by_hand = deepcopy(problem)
    optimizer, other = make(problem.params, interval=1), make(by_hand.params, interval=1)

    def halves(problem: Task) -> list[Tensor]:
        pairs = zip(problem.inputs.split(3), problem.targets.split(3), strict=True)
        return [Task(problem.model, x, y).loss() / 2 for x, y in pairs]

    for _ in range(5):
        optimizer.zero_grad()
        for loss in halves(problem):
            loss.backward()
        clip_grad_norm_(problem.params, 0.1)
        optimizer.step()

        parts = [torch.autograd.grad(loss, by_hand.params) for loss in halves(by_hand)]
        for p, first, second in zip(by_hand.params, *parts, strict=True):
            p.grad = first + second
        size = torch.stack([p.grad.norm() for p in by_hand.params]).norm()
        for p in by_hand.params:
            p.grad = p.grad * torch.clamp(0.1 / (size + 1e-6), max=1)
        other.step()
    assert_same(problem.params, by_hand.params)


@every("make", ALL)
def test_a_model_in_channels_last_trains_alike(make, generator):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 1)
    )
    inputs, targets = torch.randn(4, 3, 6, 6, generator=generator), torch.randn(4, 1, generator=generator)
    usual = Task(filled(model, generator), inputs, targets)
    last = deepcopy(usual)
    last.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    last.inputs = last.inputs.to(memory_format=torch.channels_last)
    assert not last.params[0].is_contiguous()
    usual.train(make(usual.params, interval=1), steps=6)
    last.train(make(last.params, interval=1), steps=6)
    rtol, atol = by_precision(1e-9, 1e-3), by_precision(1e-11, 1e-5)
    torch.testing.assert_close(last.params, usual.params, rtol=rtol, atol=atol)


@every("make", LEARNING)
def test_a_compiled_step_is_the_step(make, generator):
    eager = task(generator)
    compiled = deepcopy(eager)
    eager.train(make(eager.params), steps=5)
    optimizer = make(compiled.params)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(5):
        compiled.backward()
        step()
    assert_same(compiled.params, eager.params)


# Settings that change in the middle of training


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


# Bases of every kind


@every(
    "make",
    {
        "one from elsewhere": partial(FOP, optimizer_class=Descent),
        "rmsprop": BASES["rmsprop"],
        "adagrad": partial(FOP, optimizer_class=torch.optim.Adagrad, lr=0.1),
        "muon": partial(FOP, optimizer_class=torch.optim.Muon, lr=0.02),
    },
)
def test_any_base_trains(make, generator):
    problem = task(generator)
    matrices = [p for p in problem.params if p.dim() == 2]
    optimizer = make(matrices, interval=1)
    losses = problem.train(optimizer, steps=30)
    assert losses[-1] < 0.5 * losses[0]
    assert all(x.isfinite().all() for x in learned(optimizer).values())


def test_a_base_that_makes_its_state_when_it_is_empty_finds_it_empty(generator):
    problem = task(generator)
    plain = deepcopy(problem)
    problem.train(FOP(problem.params, Descent, preconditioner=Identity()), steps=5)
    plain.train(Descent(plain.params), steps=5)
    assert_same(problem.params, plain.params)
