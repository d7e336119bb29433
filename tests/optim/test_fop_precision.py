"""Half precision, mixed precision, and float32 against float64."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from optim_problems import (
    ALL,
    BASES,
    IN_BOTH_PRECISIONS,
    assert_same,
    kept,
    learned,
    resumed,
    take,
    task,
)
from problems import assert_same_bits, every
from torch import nn

from metafop import Dense
from metafop.optim import FOP


@IN_BOTH_PRECISIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every("make", ALL)
def test_m_is_in_float32_for_parameters_of_half_precision(make, dtype, generator):
    problem = task(generator, dtype)
    optimizer = make(problem.params, interval=1)
    problem.train(optimizer, steps=3)
    loaded = make(problem.params, interval=1)
    loaded.load_state_dict(resumed(optimizer.state_dict()))
    assert {x.dtype for x in learned(loaded).values()} == {torch.float32}
    assert_same(loaded.state_dict(), optimizer.state_dict())


@IN_BOTH_PRECISIONS
@every("make", ALL | {"fused adamw": partial(BASES["adamw"], fused=True)})
def test_a_step_that_the_scaler_skips_changes_nothing(make, generator):
    problem = task(generator, torch.float32)
    optimizer = make(problem.params, interval=1)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    problem.train(optimizer, steps=3)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(problem.loss()).backward()
    problem.params[2].grad[0, 0] = torch.inf
    before = kept(optimizer) | {"grads": None}
    scaler.step(optimizer)
    scaler.update()
    assert_same(kept(optimizer) | {"grads": None}, before)


@IN_BOTH_PRECISIONS
@every("make", ALL | {"fused adamw": partial(BASES["adamw"], fused=True)})
def test_training_with_a_scaler_is_training_without(make, generator):
    scaled = task(generator)
    plain = deepcopy(scaled)
    plain.train(make(plain.params, interval=1), steps=5)

    optimizer, scaler = make(scaled.params, interval=1), torch.amp.GradScaler("cpu")
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(scaled.loss()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same(scaled.params, plain.params)


@IN_BOTH_PRECISIONS
@every("make", ALL)
def test_training_under_autocast_lowers_the_loss(make, generator):
    problem = task(generator, torch.float32)
    optimizer = make(problem.params, interval=1)
    first = problem.loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = problem.loss()
        loss.backward()
        optimizer.step()
    assert problem.loss().item() < first


def test_a_step_inside_autocast_has_the_bits_of_one_outside(generator):
    ends = []
    for enabled in (True, False):
        rng = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(8, 8, generator=rng, dtype=torch.float32))
        optimizer = FOP([p], lr=0.1, momentum=0.9, preconditioner=Dense(), interval=1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            take(optimizer, [p], rng, steps=3)
        ends.append(p.detach())
    assert_same_bits(*ends)
