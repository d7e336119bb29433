"""Mistakes are refused in a sentence that names the value and what to do."""

import re
from typing import Any, cast

import pytest
import torch
from optim_problems import ALL, IN_BOTH_PRECISIONS, Prepared, Wrapping, kernels, task
from problems import every
from torch import nn

from metafop import SGD, Dense, LowRank, Spatial
from metafop.optim import FOP


def refused(*args: Any, **settings: Any) -> Any:
    return lambda params: FOP(params, *args, **settings)


MISTAKES = {
    "order": (refused(order="none"), ValueError, ["order", "'none'", "'exact'", "'paper'"]),
    "a setting that nobody has": (refused(metalr=1e-3), TypeError, ["'metalr'", "meta_lr", "SGD's"]),
    "credit": (refused(credit="none"), ValueError, ["credit", "'none'", "'velocity'", "'gradient'"]),
    "preset": (refused(preset="best"), ValueError, ["preset", "'best'", "'default'", "'paper'"]),
    "interval": (refused(interval=0), ValueError, ["interval", "0", "whole number"]),
    "fraction of an interval": (refused(interval=1.5), ValueError, ["interval", "1.5", "whole number"]),
    "meta_lr": (refused(meta_lr=-1), ValueError, ["meta_lr", "-1", "1e-3"]),
    "endless meta_lr": (refused(meta_lr=float("inf")), ValueError, ["meta_lr", "inf", "1e-3"]),
    "meta_lr of nan": (refused(meta_lr=float("nan")), ValueError, ["meta_lr", "nan", "1e-3"]),
    "learn": (refused(learn=("x",)), ValueError, ["learns", "('x',)", "precond"]),
    "learn nothing": (refused(learn=()), ValueError, ["learns", "()", "precond"]),
    "learn by letters": (refused(learn="lr"), ValueError, ["learns", "'lr'", "precond"]),
    "differentiable": (refused(differentiable=True), ValueError, ["differentiable=True", "hypergradients"]),
    "preconditioner": (refused(preconditioner="best"), TypeError, ["'best'", "'fop-norm'", "LowRank(8)"]),
    "preconditioner's class": (refused(preconditioner=LowRank), TypeError, ["LowRank", "family"]),
    "instance": (
        lambda params: FOP(params, cast(Any, torch.optim.SGD(params, lr=0.1))),
        TypeError,
        ["class of an optimizer", "torch.optim.SGD"],
    ),
    "not an optimizer": (refused(nn.Linear), TypeError, ["class of an optimizer", "Linear"]),
    "lbfgs": (refused(torch.optim.LBFGS), TypeError, ["LBFGS", "another optimizer"]),
    "patterns without names": (
        refused(preconditioner={"*": Dense()}),
        ValueError,
        ["['*']", "without names", "named_parameters"],
    ),
    "lr of rmsprop": (refused(torch.optim.RMSprop, learn=("lr",)), ValueError, ["lr of RMSprop", "AdamW"]),
    "lr with dampening": (
        refused(momentum=0.9, dampening=0.1, learn=("lr",)),
        ValueError,
        ["lr of SGD", "dampening"],
    ),
    "momentum of zero": (
        refused(learn=("momentum",)),
        ValueError,
        ["momentum", "above zero", "momentum=0.9"],
    ),
    "momentum of adamw": (refused(torch.optim.AdamW, learn=("momentum",)), ValueError, ["momentum", "AdamW"]),
    "base with the groups of another": (
        refused(Wrapping),
        TypeError,
        ["param_groups", "Wrapping", "without a setter", "that it wraps"],
    ),
    "base's own": (refused(momentum=-1.0), ValueError, ["Invalid momentum value: -1.0"]),
    "unknown setting": (refused(momentun=0.9), TypeError, ["momentun"]),
}


@IN_BOTH_PRECISIONS
@every("make, error, words", MISTAKES)
def test_a_mistake_is_named_with_its_value_and_its_remedy(make, error, words, generator):
    with pytest.raises(error) as raised:
        make(task(generator).params)
    assert [word for word in words if word not in str(raised.value)] == []


FOR_ALL = {
    "preset": ("paper", "preset"),
    "seed": (3, "seed"),
    "meta_optimizer": (SGD(), "meta_optimizer"),
    "optimizer_class": (torch.optim.Adam, "optimizer_class"),
    "generator": (torch.Generator(), "seed"),
}


@pytest.mark.parametrize("name", FOR_ALL)
def test_what_holds_for_all_groups_is_refused_in_one_of_them(name, generator):
    (first, later), (value, asked) = task(generator).params[:2], FOR_ALL[name]
    told = re.escape(f"got {name}={value!r} in one of them. Pass {asked} to FOP itself.")
    with pytest.raises(ValueError, match=told):
        FOP([{"params": [first], name: value}], lr=0.1)
    optimizer = FOP([first], lr=0.1)
    with pytest.raises(ValueError, match=told):
        optimizer.add_param_group({"params": [later], name: value})
    assert len(optimizer.param_groups) == 1


def test_a_setting_of_the_base_may_have_any_name(generator):
    class Seeded(Prepared):
        def __init__(self, params, lr=0.1):
            super().__init__(params, lr)
            self.defaults["seed"] = 1
            for group in self.param_groups:
                group["seed"] = 1

    optimizer = FOP([kernels(generator)], Seeded)
    optimizer.add_param_group({"params": [kernels(generator)], "seed": 2})
    assert [group["seed"] for group in optimizer.param_groups] == [1, 2]


@IN_BOTH_PRECISIONS
def test_a_parameter_that_its_preconditioner_cannot_take_is_named(generator):
    model = task(generator).model
    with pytest.raises(ValueError, match=r"'0\.bias'.*Spatial"):
        FOP(model.named_parameters(), lr=0.1, preconditioner=Spatial())


def test_a_pattern_that_fits_nothing_is_refused(generator):
    with pytest.raises(ValueError, match=r"'wieght' fits none of the parameters \['weight'\]"):
        FOP([("weight", kernels(generator))], lr=0.1, preconditioner={"wieght": Dense()})


@pytest.mark.parametrize("meta_optimizer", ["adam", SGD, torch.optim.Adam], ids=str)
def test_a_meta_optimizer_that_is_not_pure_is_refused(meta_optimizer, generator):
    with pytest.raises(TypeError, match=r"a pure one, such as metafop\.Adam\(\)"):
        FOP([kernels(generator)], lr=0.1, meta_optimizer=meta_optimizer)


@IN_BOTH_PRECISIONS
@every("make", ALL)
def test_an_lr_of_two_numbers_is_refused(make, generator):
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        make(task(generator).params, lr=torch.tensor([0.1, 0.1]))


@IN_BOTH_PRECISIONS
def test_a_complex_parameter_is_refused():
    with pytest.raises(TypeError, match=r"real parameters.*'w'.*complex.*view_as_real"):
        FOP([("w", torch.zeros(2, 2, dtype=torch.complex64, requires_grad=True))], lr=0.1)
