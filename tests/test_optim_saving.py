"""The state is what optimizer.state holds: it is saved whole, and loaded whole or not at all."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from optim_problems import ALL, BASES, PLAIN, Task, assert_same, kept, learned, resumed, task
from problems import every
from torch import Tensor, nn

from metafop import Dense, Diagonal

RESUMED = {name: make for name, make in ALL.items() if name != "sgd"}


pytestmark = pytest.mark.usefixtures("precision")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every("make", RESUMED)
def test_training_resumed_from_a_file_is_training_that_never_stopped(make, dtype, generator):
    problem = task(generator, dtype)
    optimizer = make(problem.params, interval=3)
    problem.train(optimizer, steps=4)
    copied = deepcopy(problem)
    loaded = make(copied.params, interval=3)
    loaded.load_state_dict(resumed(optimizer.state_dict()))

    problem.train(optimizer, steps=7)
    copied.train(loaded, steps=7)
    assert_same(kept(loaded), kept(optimizer))


@pytest.mark.parametrize("name", PLAIN)
def test_the_state_of_the_base_alone_is_loaded_and_p_starts_fresh(name, generator):
    problem = task(generator)
    plain = PLAIN[name](problem.params)
    problem.train(plain, steps=4)
    copied, fresh = deepcopy(problem), deepcopy(problem)
    optimizer = BASES[name](copied.params, preconditioner=Dense(), interval=1)
    optimizer.load_state_dict(resumed(plain.state_dict()))
    other = BASES[name](fresh.params, preconditioner=Dense(), interval=1)

    copied.train(optimizer, steps=1)
    problem.train(plain, steps=1)
    fresh.train(other, steps=1)
    torch.testing.assert_close(copied.params, problem.params, rtol=1e-12, atol=1e-14)  # P starts as I
    assert_same(learned(optimizer), learned(other))
    losses = copied.train(optimizer, steps=8)
    assert losses[-1] < losses[0]


def two_groups(problem: Task) -> list[dict[str, Any]]:
    return [{"params": problem.params[:2]}, {"params": problem.params[2:]}]


def wider(problem: Task) -> list[Tensor]:
    return [nn.Parameter(torch.ones(*[n + 1 for n in p.shape])) for p in problem.params]


REFUSED = {
    "other groups": (two_groups, {}, r"groups of \[2, 4\] parameters.*groups of \[6\].*same groups"),
    "another preconditioner": (lambda x: x.params, {"preconditioner": Diagonal()}, r"Diagonal.*'fop'"),
    "another model": (wider, {}, "for the same model"),
    "another order": (lambda x: x.params[::-1], {}, "for the same model"),
}


@every("params, settings, message", REFUSED)
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(name, params, settings, message, generator):
    problem = task(generator)
    optimizer = BASES[name](problem.params, interval=1)
    copied = deepcopy(problem)
    twin = BASES[name](copied.params, interval=1)
    problem.train(optimizer, steps=3)
    copied.train(twin, steps=3)
    other = BASES[name](params(deepcopy(problem)), interval=1, **settings)
    for group in other.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    other.step()
    before = kept(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(other.state_dict())
    assert_same(kept(optimizer), before)

    problem.train(optimizer, steps=3)
    copied.train(twin, steps=3)
    assert_same(kept(optimizer), kept(twin))


# The state is what optimizer.state holds, whoever wrote it


@every("make", ALL)
def test_tensors_of_the_state_may_be_replaced_by_equal_ones(make, generator):
    problem = task(generator)
    other = deepcopy(problem)
    optimizer, plain = make(problem.params, interval=1), make(other.params, interval=1)
    for _ in range(3):
        problem.train(optimizer, steps=2)
        for state in optimizer.state.values():
            for key, x in state.items():
                state[key] = x.clone() if isinstance(x, Tensor) else x
    other.train(plain, steps=6)
    assert_same(kept(optimizer), kept(plain))


@every("make", ALL)
def test_an_m_written_into_the_state_is_the_one_that_is_used(make, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=3)
    problem.train(optimizer, steps=4)
    copied = deepcopy(problem)
    loaded = make(copied.params, interval=3)
    changed = resumed(optimizer.state_dict())
    for states in (optimizer.state, changed["state"]):
        for state in states.values():
            if "fop_m0" in state:
                state["fop_m0"] = 0.5 * state["fop_m0"]
    loaded.load_state_dict(changed)

    problem.train(optimizer, steps=1)
    copied.train(loaded, steps=1)
    assert_same(copied.params, problem.params)


@every("make", BASES)
def test_a_state_that_is_cleared_starts_anew(make, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=1)
    problem.train(optimizer, steps=3)
    copied = deepcopy(problem)
    fresh = make(copied.params, interval=1)
    optimizer.state.clear()
    problem.train(optimizer, steps=4)
    copied.train(fresh, steps=4)
    assert_same(problem.params, copied.params)
    for one in (optimizer, fresh):
        for entry in one.state.values():
            entry.pop("fop_next", None)  # the step of the group in which to learn next
    assert_same(optimizer.state_dict()["state"], fresh.state_dict()["state"])
