"""What users do to optimizers, and what must not happen silently then."""

from collections import defaultdict
from copy import deepcopy
from functools import wraps

import pytest
import torch
from problems import assert_near, assert_same_bits
from torch import nn

from metafop import SGD, Dense, Diagonal, Momentum
from metafop.optim import FOP


def kernels(generator, format=torch.contiguous_format):
    weight = torch.randn(4, 2, 3, 3, generator=generator).to(memory_format=format)
    return nn.Parameter(weight)


def take(optimizer, params, generator, steps=1):
    for _ in range(steps):
        for p in params:
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        optimizer.step()


@pytest.mark.parametrize("preconditioner", ["fop", "pp-hd"])
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam])
def test_fused_bases_get_gradients_that_lie_as_their_parameters_do(base, preconditioner):
    ends = []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        p = kernels(generator, torch.channels_last)
        settings = {"lr": 0.1, "interval": 1, "meta_lr": 0.05, "preconditioner": preconditioner}
        take(FOP([p], base, fused=fused, **settings), [p], generator, steps=4)
        ends.append(p.detach())
    assert_near({"p": ends[0]}, {"p": ends[1]}, 1e-10)


@pytest.mark.parametrize("interval", [1, 2, 10])
def test_parameters_with_gradients_in_turn_are_learned_too(interval, generator):
    heads = [kernels(generator), kernels(generator)]
    optimizer = FOP(heads, lr=0.1, momentum=0.9, interval=interval)
    for step in range(100):
        take(optimizer, [heads[step % 2]], generator)
        heads[step % 2].grad = None
    updates = [optimizer.state[p]["fop_updates"] for p in heads]
    assert min(updates) >= 49 // max(interval, 2) - 1


def test_a_heavy_ball_that_starts_to_roll_takes_the_credit_of_its_velocity(generator):
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


def test_a_state_that_is_replaced_starts_anew_and_is_the_one_that_is_saved(generator):
    p = kernels(generator)
    optimizer = FOP([p], lr=0.1, momentum=0.9, interval=1)
    take(optimizer, [p], generator, steps=3)
    optimizer.state = defaultdict(dict)
    take(optimizer, [p], generator, steps=3)
    assert optimizer.state_dict()["state"][0]["fop_updates"] == 2


def test_a_parameter_that_was_put_into_a_group_by_hand_is_refused(generator):
    p, other = kernels(generator), kernels(generator)
    optimizer = FOP([p], lr=0.1)
    optimizer.param_groups[0]["params"].append(other)
    with pytest.raises(RuntimeError, match=r"Group 0 holds a parameter .* add_param_group"):
        take(optimizer, [p], generator)


def test_what_is_learned_of_lr_and_momentum_is_seen_by_group(generator):
    params = [kernels(generator), kernels(generator)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(params, (0.1, 0.2), strict=True)]
    optimizer = FOP(groups, momentum=0.9, learn=("lr", "momentum"), meta_lr=0.1)
    take(optimizer, params, generator, steps=3)
    shown = optimizer.diagnostics()
    assert shown.keys() == {"hyper/lr/0", "hyper/lr/1", "hyper/momentum/0", "hyper/momentum/1"}
    assert abs(shown["hyper/lr/1"] - 0.2) > 1e-3


def test_groups_that_were_passed_once_can_be_passed_again(generator):
    groups = [{"params": [kernels(generator)], "preconditioner": Diagonal()}]
    first, second = FOP(groups, lr=0.1), FOP(groups, lr=0.1)
    assert first.param_groups[0]["preconditioner"] == second.param_groups[0]["preconditioner"] == "Diagonal()"


def test_a_pattern_that_fits_nothing_is_refused(generator):
    with pytest.raises(ValueError, match=r"'wieght' fits none of the parameters \['weight'\]"):
        FOP([("weight", kernels(generator))], lr=0.1, preconditioner={"wieght": Dense()})


@pytest.mark.parametrize("meta_optimizer", ["adam", SGD, torch.optim.Adam], ids=str)
def test_what_is_no_pure_optimizer_cannot_move_m(meta_optimizer, generator):
    with pytest.raises(TypeError, match=r"a pure one, such as metafop\.Adam\(\)"):
        FOP([kernels(generator)], lr=0.1, meta_optimizer=meta_optimizer)


@pytest.mark.parametrize("credit", ["velocity", "gradient"])
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_a_first_step_that_failed_can_be_repeated(preset, credit, generator, monkeypatch):
    ends = []
    for base in (torch.optim.SGD, torch.optim.Adam):
        p = kernels(torch.Generator().manual_seed(0))
        optimizer = FOP([p], base, lr=0.1, preset=preset, credit=credit, interval=1)
        whole = base.step

        def fail(*_):
            raise OSError("the base fails")

        monkeypatch.setattr(base, "step", wraps(fail)(lambda *args: fail(*args)))
        p.grad = torch.ones_like(p)
        with pytest.raises(OSError, match="the base fails"):
            optimizer.step()
        assert not optimizer.state
        monkeypatch.setattr(base, "step", whole)
        take(optimizer, [p], generator, steps=3)
        ends.append(optimizer.state[p]["fop_updates"])
    assert ends == [2, 2]
