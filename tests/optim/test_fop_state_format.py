"""The keys, shapes and precisions of saved states: states of this form were saved, and must always load."""

import pytest
import torch
from optim_problems import assert_same, take, weights
from problems import every
from torch import Tensor

from metafop.optim import FOP

# Of a weight of shape (4, 5) under LowRank(4). "wide" is the parameter's precision, but at least float32.
THETA, M, SCALAR = ((4, 5), "wide"), ((5, 4), "wide"), ((), "wide")
BASE = ((4, 5), "base")
P = {
    "fop_m0": M,
    "fop_meta0_0": SCALAR,
    "fop_meta0_1": M,
    "fop_meta0_2": M,
    "fop_updates": int,
    "fop_next": int,
    "fop_taken": int,
    "fop_lr": float,
    "fop_rolled": int,
    "fop_moved": SCALAR,
}
VELOCITY = {"momentum_buffer": BASE}
ADAM = {"step": ((), "time"), "exp_avg": BASE, "exp_avg_sq": BASE}
BEFORE = {"fop_steered": int, "fop_before": BASE, "fop_direction": THETA}
MOMENTS = {"fop_held_time": ((), "single"), "fop_held_mean": BASE, "fop_held_square": BASE}
OFFSETS = {
    f"fop_{name}_{entry}": form
    for name in ("lr", "momentum")
    for entry, form in (
        ("offset", SCALAR),
        ("updates", int),
        ("used", float),
        ("0", SCALAR),
        ("1", SCALAR),
        ("2", SCALAR),
    )
}
STATES = {
    "sgd": ({"lr": 0.05}, P | {"fop_credit": THETA}, {}),
    "momentum": ({"lr": 0.05, "momentum": 0.9}, P | VELOCITY | {"fop_memory": THETA}, {}),
    "nesterov": (
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
        P | VELOCITY | {"fop_memory": THETA, "fop_credit": THETA},
        {},
    ),
    "paper": (
        {"lr": 0.05, "momentum": 0.9, "preset": "paper"},
        P | VELOCITY | {"fop_credit": THETA},
        {},
    ),
    "adam": (
        {"optimizer_class": torch.optim.Adam, "lr": 0.01},
        P | ADAM | {"fop_memory": THETA, "fop_credit": THETA},
        {},
    ),
    "paper, adam": (
        {"optimizer_class": torch.optim.Adam, "lr": 0.01, "preset": "paper"},
        P | ADAM | MOMENTS | {"fop_credit": THETA, "fop_direction": THETA},
        {},
    ),
    "learned lr and momentum": (
        {"lr": 0.05, "momentum": 0.9, "learn": ("precond", "lr", "momentum")},
        P | VELOCITY | BEFORE | {"fop_memory": THETA, "fop_held_velocity": BASE},
        OFFSETS,
    ),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def in_precision(table, dtype):
    """Return the form of each entry for a parameter of that precision; a count's is torch's own affair."""
    precisions = {"base": dtype, "wide": torch.promote_types(dtype, torch.float32)}
    precisions |= {"single": torch.float32, "time": "any"}
    return {
        k: form if isinstance(form, type) else (form[0], precisions[form[1]]) for k, form in table.items()
    }


def forms_of(entries, table):
    """Return the form of each entry; where the table leaves the precision open, so does this."""
    return {
        k: (tuple(x.shape), "any" if table.get(k, ((), ""))[1:] == ("any",) else x.dtype)
        if isinstance(x, Tensor)
        else type(x)
        for k, x in entries.items()
    }


def example(form):
    """Return an entry of this form."""
    if isinstance(form, type):
        return form(1)
    return torch.ones(form[0], dtype=torch.float32 if form[1] == "any" else form[1])


def trained(settings, dtype, steps):
    generator = torch.Generator().manual_seed(0)
    params = weights(generator, (4, 5), (4,), dtype=dtype)
    optimizer = FOP(params, **settings)
    take(optimizer, params, generator, steps)
    return optimizer


@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every("settings, of_weight, of_group", STATES)
def test_a_state_has_these_keys_shapes_and_precisions(settings, of_weight, of_group, dtype, steps):
    saved = trained(settings, dtype, steps).state_dict()
    of_weight, of_group = in_precision(of_weight, dtype), in_precision(of_group, dtype)
    assert forms_of(saved["state"][0], of_weight) == of_weight
    own = {k: x for k, x in saved["param_groups"][0].items() if k.startswith("fop_")}
    assert forms_of(own, of_group) == of_group | {"fop_steps": int}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every("settings, of_weight, of_group", STATES)
def test_a_state_of_this_form_loads_unchanged_and_goes_on(settings, of_weight, of_group, dtype):
    optimizer = trained(settings, dtype, steps=1)
    saved = optimizer.state_dict()
    saved["state"][0] = {k: example(form) for k, form in in_precision(of_weight, dtype).items()}
    saved["param_groups"][0] |= {k: example(form) for k, form in in_precision(of_group, dtype).items()}
    optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict()["state"][0], saved["state"][0])
    take(optimizer, optimizer.param_groups[0]["params"], torch.Generator().manual_seed(1), steps=12)
    assert optimizer.state_dict()["state"][0]["fop_updates"] > 1


@pytest.mark.parametrize("key", ["fop_m0", "fop_meta0_0", "fop_memory"])
def test_a_state_with_an_entry_of_another_shape_is_refused(key):
    settings = STATES["momentum"][0]
    optimizer, saved = trained(settings, torch.float64, 1), trained(settings, torch.float64, 1).state_dict()
    saved["state"][0][key] = torch.ones(7)
    with pytest.raises(ValueError, match=rf"{key} \(of shape .*, not \(7,\)\) for the parameter '0'"):
        optimizer.load_state_dict(saved)
