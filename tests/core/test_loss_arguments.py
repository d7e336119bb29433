"""Whether a loss is given leaves is read from its arguments: it is if it needs one more, never by chance."""

import functools
from typing import Any

import pytest
import torch
from problems import every
from torch import nn

from metafop import SGD, Training, functional
from metafop.functional import takes_leaves
from metafop.hypergradients import adjoint

PARAMS = {"w": torch.ones(3, dtype=torch.float64)}


def without(params, batch):
    return params["w"].square().sum()


def given(params, batch, leaves):
    return leaves["l2"] * params["w"].square().sum()


def with_a_setting(params, batch, scale=2.0):
    return scale * params["w"].square().sum()


def with_optional_leaves(params, batch, leaves=None):
    return params["w"].square().sum() if leaves is None else given(params, batch, leaves)


def given_and_a_setting(params, batch, leaves, scale=2.0):
    return scale * given(params, batch, leaves)


def set_first(scale, params, batch, leaves):
    return scale * given(params, batch, leaves)


def set_last(params, batch, leaves, scale):
    return scale * given(params, batch, leaves)


def set_by_name(params, batch, *, scale=2.0):
    return scale * params["w"].square().sum()


def any_number(params, batch, *others):
    return given(params, batch, *others) if others else without(params, batch)


def anything(*arguments, **settings):
    return any_number(*arguments)


class Given:
    def __call__(self, params, batch, leaves):
        return given(params, batch, leaves)

    def method(self, params, batch, leaves):
        return given(params, batch, leaves)

    @classmethod
    def of_the_class(cls, params, batch, leaves):
        return given(params, batch, leaves)

    @staticmethod
    def of_no_object(params, batch, leaves):
        return given(params, batch, leaves)


def decorated(loss, signed=True):
    def same(*arguments, **settings):
        return loss(*arguments, **settings)

    return functools.wraps(loss)(same) if signed else same


# Each with what its setting makes of the loss.
TAKE = {
    "a third argument": (given, 1),
    "and a setting": (given_and_a_setting, 2),
    "an object": (Given(), 1),
    "a method": (Given().method, 1),
    "of a class": (Given.of_the_class, 1),
    "of no object": (Given.of_no_object, 1),
    "partial, first": (functools.partial(set_first, 3), 3),
    "partial, by name": (functools.partial(set_last, scale=3), 3),
    "decorated": (decorated(given), 1),
}
DO_NOT = {
    "none": without,
    "a setting": with_a_setting,
    "a setting that is called leaves": with_optional_leaves,
    "a setting by name": set_by_name,
    "any number": any_number,
    "anything": anything,
    "partial, the leaves": functools.partial(given, leaves={"l2": torch.tensor(0.5)}),
    "partial, a setting": functools.partial(with_a_setting, scale=3.0),
    "decorated": decorated(without),
    "decorated without its signature": decorated(without, signed=False),
}


def made(loss, leaves):
    training = Training(functional.plain(loss), SGD())
    meta = training.init_meta(PARAMS, loss=leaves, lr=0.1)
    return training, lambda carry: carry.params["w"].sum(), meta, training.init(PARAMS), 2 * [torch.ones(1)]


@every("loss, scale", TAKE)
def test_a_loss_that_needs_one_argument_more_is_given_leaves(loss, scale):
    assert takes_leaves(loss, 2)
    estimate = adjoint(*made(loss, {"l2": 0.3}))
    torch.testing.assert_close(estimate.value, torch.tensor(3 * (1 - 0.2 * scale * 0.3) ** 2))
    with pytest.raises(TypeError, match=r"takes leaves of meta as its last argument, and init_meta got none"):
        made(loss, None)


@every("loss", DO_NOT)
def test_any_other_is_not_and_leaves_for_it_are_refused(loss):
    assert not takes_leaves(loss, 2)
    estimate = adjoint(*made(loss, None))
    assert estimate.grads.loss == ()
    assert estimate.info["notes"] == ()
    with pytest.raises(TypeError, match=r"leaves for the loss, \['l2'\], which has no argument for them"):
        made(loss, {"l2": 0.3})


def pure(function):
    return lambda params, buffers, batch, *leaves: (function(params, batch, *leaves), buffers)


RAW: dict[str, tuple[Any, bool]] = {
    "three": (lambda params, buffers, batch: (without(params, batch), buffers), False),
    "a setting": (lambda params, buffers, batch, scale=2.0: (scale * without(params, batch), buffers), False),
    "any number": (pure(any_number), False),
    "four": (lambda params, buffers, batch, leaves: (given(params, batch, leaves), buffers), True),
    "four and a setting": (
        lambda params, buffers, batch, leaves, scale=1.0: (scale * given(params, batch, leaves), buffers),
        True,
    ),
}


@every("loss, takes", RAW)
def test_a_pure_loss_by_its_fourth_argument(loss, takes):
    training = Training(loss, SGD())
    with pytest.raises(TypeError, match="leaves"):
        training.init_meta(PARAMS, loss=None if takes else {"l2": 0.3}, lr=0.1)
    meta = training.init_meta(PARAMS, loss={"l2": 0.3} if takes else None, lr=0.1)
    after, _ = training.step(meta, training.init(PARAMS), None)
    assert (after.params["w"] < 1).all()


def test_the_loss_of_a_module_by_its_third():
    model = nn.Linear(2, 1)
    weighted, params, _ = functional.from_module(
        model, lambda model, batch, leaves: leaves * model(batch).sum()
    )
    plain, _, _ = functional.from_module(model, lambda model, batch, scale=2.0: scale * model(batch).sum())
    assert takes_leaves(weighted, 3)
    assert not takes_leaves(plain, 3)
    assert Training(weighted, SGD()).init_meta(params, loss=0.5, lr=0.1).loss == 0.5
    assert Training(plain, SGD()).init_meta(params, lr=0.1).loss == ()


def scaled(scale, carry, meta):
    return scale * carry.params["w"].sum() * meta.loss["l2"]


OUTER = {
    "a carry": (lambda carry: carry.params["w"].sum(), False),
    "meta too": (lambda carry, meta: carry.params["w"].sum() * meta.loss["l2"], True),
    "a setting": (lambda carry, scale=2.0: scale * carry.params["w"].sum(), False),
    "partial": (
        functools.partial(scaled, 2.0),
        True,
    ),
}


@every("outer_loss, reads", OUTER)
def test_an_outer_loss_by_its_second(outer_loss, reads):
    training, _, meta, carry, batches = made(given, {"l2": 0.3})
    d_l2 = adjoint(training, outer_loss, meta, carry, batches).grads.loss["l2"]
    assert (d_l2 > 0) == reads  # of its own l2, more than of that of the steps


def test_a_loss_that_takes_its_leaves_apart_leaves_meta_as_it_is():
    def popping(params, batch, leaves):
        return leaves.pop("l2") * params["w"].square().sum()

    training, outer_loss, meta, carry, batches = made(popping, {"l2": 0.3})
    training.step(meta, carry, batches[0])
    assert adjoint(training, outer_loss, meta, carry, batches).grads.loss.keys() == meta.loss.keys() == {"l2"}
