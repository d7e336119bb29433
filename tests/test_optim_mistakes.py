"""What is refused at the door, in a sentence that tells what to do."""

from typing import Any, cast

import pytest
import torch
from optim_problems import task
from problems import every
from torch import nn

from metafop import Dense, LowRank, Spatial
from metafop.optim import FOP

pytestmark = pytest.mark.usefixtures("precision")


def refused(*args: Any, **settings: Any) -> Any:
    return lambda params: FOP(params, *args, **settings)


MISTAKES = {
    "order": (refused(order="none"), ValueError, ["order", "'none'", "'exact'", "'paper'"]),
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
    "base's own": (refused(momentum=-1.0), ValueError, ["Invalid momentum value: -1.0"]),
    "unknown setting": (refused(momentun=0.9), TypeError, ["momentun"]),
}


@every("make, error, words", MISTAKES)
def test_a_mistake_is_named_with_its_value_and_its_remedy(make, error, words, generator):
    with pytest.raises(error) as raised:
        make(task(generator).params)
    assert [word for word in words if word not in str(raised.value)] == []


def test_a_parameter_that_its_preconditioner_cannot_take_is_named(generator):
    model = task(generator).model
    with pytest.raises(ValueError, match=r"'0\.bias'.*Spatial"):
        FOP(model.named_parameters(), lr=0.1, preconditioner=Spatial())
