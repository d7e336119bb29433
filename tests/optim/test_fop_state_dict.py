"""The state is what optimizer.state holds: it is saved whole, and loaded whole or not at all."""

import pickle
from collections import defaultdict
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from optim_problems import (
    ALL,
    BASES,
    IN_BOTH_PRECISIONS,
    MOMENTUM,
    PLAIN,
    Prepared,
    Task,
    assert_same,
    kept,
    kernels,
    learned,
    resumed,
    take,
    task,
    weights,
)
from problems import assert_same_bits, every
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from metafop import SGD, Dense, Diagonal, Momentum
from metafop.optim import FOP

RESUMED = {name: make for name, make in ALL.items() if name != "sgd"}
WITH_STATE_OF_ITS_OWN = {"a base with state of its own": partial(FOP, optimizer_class=Prepared)}


@IN_BOTH_PRECISIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every("make", RESUMED | WITH_STATE_OF_ITS_OWN)
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


@IN_BOTH_PRECISIONS
@every("make", RESUMED)
def test_a_distributed_checkpoint_continues_the_same_bits(make, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=3)
    problem.train(optimizer, steps=4)
    copied = deepcopy(problem)
    loaded = make(copied.params, interval=3)
    saved = resumed(get_optimizer_state_dict(problem.model, optimizer))
    set_optimizer_state_dict(copied.model, loaded, saved)

    problem.train(optimizer, steps=5)
    copied.train(loaded, steps=5)
    assert_same(kept(loaded), kept(optimizer))


@IN_BOTH_PRECISIONS
@pytest.mark.parametrize(
    "copy", [deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
@every("make", ALL)
def test_a_copy_with_its_model_continues_the_same_bits(make, copy, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=3)
    problem.train(optimizer, steps=4)
    problem_copy, optimizer_copy = copy((problem, optimizer))
    assert [id(p) for g in optimizer_copy.param_groups for p in g["params"]] == [
        *map(id, problem_copy.params)
    ]

    problem.train(optimizer, steps=5)
    before = kept(optimizer)
    problem_copy.train(optimizer_copy, steps=5)
    assert_same(kept(optimizer_copy), before)
    assert_same(kept(optimizer), before)


@pytest.mark.parametrize("cut", [1, 5, 9, 10, 11, 15])
def test_training_resumed_between_two_updates_of_m_ends_with_the_same_bits(cut, generator):
    problem = task(generator, torch.float32)
    copied = deepcopy(problem)
    make = partial(FOP, optimizer_class=torch.optim.SGD, **MOMENTUM)
    optimizer, first = make(problem.params), make(copied.params)
    problem.train(optimizer, steps=25)
    copied.train(first, steps=cut)
    second = make(copied.params)
    second.load_state_dict(deepcopy(first.state_dict()))
    copied.train(second, steps=25 - cut)
    assert_same(second.state_dict(), optimizer.state_dict())
    assert optimizer.state[problem.params[0]]["fop_updates"] == 2


@pytest.mark.parametrize("cut", [8, 9, 10, 11, 12])
def test_training_resumed_where_base_and_kernel_alternate_ends_with_the_same_bits(cut):
    def trained(stops):
        generator = torch.Generator().manual_seed(0)
        params = weights(generator, (6, 5))
        params[0].data += 100  # so that Δθ is rounded
        settings = MOMENTUM | {"lr": 1e-4, "interval": 4}
        optimizer = FOP(params, torch.optim.SGD, **settings)
        for step in range(16):
            if step in stops:
                saved, optimizer = optimizer.state_dict(), FOP(params, torch.optim.SGD, **settings)
                optimizer.load_state_dict(deepcopy(saved))
            grad = torch.randn(5, 6, generator=generator, dtype=torch.float32).mT
            params[0].grad = grad if step in (9, 10, 11) else grad.contiguous()
            optimizer.step()
        return optimizer.state_dict()["state"]

    once, twice = trained([]), trained([cut])
    assert_same(twice, once)


@IN_BOTH_PRECISIONS
@pytest.mark.parametrize("name", PLAIN)
def test_the_state_of_the_base_alone_is_loaded_and_p_starts_anew(name, generator):
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


@IN_BOTH_PRECISIONS
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


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        ({"meta_optimizer": SGD()}, {}, "meta0_0.* meta-optimizer"),
        ({}, {"meta_optimizer": Momentum()}, "of shape .* meta-optimizer"),
        ({}, {"optimizer_class": torch.optim.Adam}, "no betas, eps.*another kind of optimizer"),
        ({"optimizer_class": torch.optim.Adam}, {}, "no momentum, dampening.*another kind of optimizer"),
    ],
)
def test_the_state_of_another_base_or_meta_optimizer_is_refused(saved, here, message, generator):
    p = kernels(generator)
    old, new = FOP([p], lr=0.1, interval=1, **saved), FOP([p], lr=0.1, interval=1, **here)
    take(old, [p], generator, steps=2)
    take(new, [p], generator, steps=2)
    before = deepcopy(new.state_dict())
    with pytest.raises(ValueError, match=message):
        new.load_state_dict(old.state_dict())
    assert_same_bits(new.state_dict()["state"], before["state"])
    assert new.state_dict()["param_groups"] == before["param_groups"]
    take(new, [p], generator)


@IN_BOTH_PRECISIONS
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


@IN_BOTH_PRECISIONS
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


@IN_BOTH_PRECISIONS
@pytest.mark.parametrize("how", ["cleared", "replaced"])
@every("make", BASES)
def test_a_state_that_is_cleared_or_replaced_starts_anew(make, how, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=1)
    problem.train(optimizer, steps=3)
    copied = deepcopy(problem)
    fresh = make(copied.params, interval=1)
    if how == "cleared":
        optimizer.state.clear()
    else:
        optimizer.state = defaultdict(dict)
    problem.train(optimizer, steps=4)
    copied.train(fresh, steps=4)
    assert_same(problem.params, copied.params)
    for one in (optimizer, fresh):
        for entry in one.state.values():
            entry.pop("fop_next", None)  # the step of the group in which to learn next
    assert_same(optimizer.state_dict()["state"], fresh.state_dict()["state"])
