"""Leaves of the loss that cannot be, or are not used: one sentence each, with the remedy."""

from typing import Any, cast

import numpy
import pytest
import torch
from penalized import estimate, leaves, meta, params, training
from problems import assert_clear, assert_same_bits
from torch import nn
from torch.nn import functional as F

from metafop import SGD, Adam, Online, Scheduled
from metafop.hypergradients import adjoint, autograd, evolution, forward
from metafop.optimizers import Positive, Unit


def without_leaves(**settings):
    return training(lambda params, batch: params["w"].square().sum(), **settings)


def taken(loss, given, batch):
    """Take steps whose loss reads the `given` leaf with a batch."""

    def product(params, batch, leaves):
        return (loss(leaves, batch) * params["w"]).sum()

    return estimate(loss=product, given=given, batches=[batch])


def replaced(l2):
    own, given = training(), meta()
    return autograd(
        own,
        lambda carry: carry.params["w"].sum(),
        given._replace(loss=given.loss | {"l2": l2}),
        own.init(params),
        [torch.ones(3)],
    )


def numbers_alone(params, batch, leaves):
    return leaves["l2"].item() * (leaves["weights"] * params["w"]).sum()


def writing(params, batch, leaves):
    return (leaves["weights"].mul_(2) * params["w"]).sum() * leaves["l2"]


MADE = {
    "integers": (
        lambda: meta({"index": torch.arange(3)}),
        ["loss.index", "int64", "floating-point", "batch"],
    ),
    "booleans": (lambda: meta({"mask": torch.ones(3) > 0}), ["loss.mask", "torch.bool"]),
    "a bool": (lambda: meta({"on": True}), ["loss.on", "True", "bool", "Pass a tensor"]),
    "complex": (lambda: meta({"w": torch.ones(3) * 1j}), ["loss.w", "complex128", "real floating-point"]),
    "words": (lambda: meta({"mode": "fast"}), ["loss.mode", "'fast'", "a str", "Pass a tensor"]),
    "none": (lambda: meta({"a": (None, 1.0)}), ["loss.a.0", "None", "Pass a tensor"]),
    "an array": (lambda: meta({"a": numpy.ones((100, 10))}), ["loss.a", "ndarray", "Pass a tensor"]),
    "a parameter": (lambda: meta({"a": nn.Parameter(torch.ones(3))}), ["loss.a", "nn.Parameter", "detach()"]),
    "no numbers": (lambda: meta({"a": torch.ones(0, 2)}), ["loss.a", "(0, 2)", "Leave it out"]),
    "not a number": (lambda: meta({"a": torch.tensor([1.0, torch.nan])}), ["loss.a[1]", "nan", "finite"]),
    "infinite": (lambda: meta({"a": (1.0, torch.inf)}), ["loss.a.1", "inf", "finite", "Pass a value"]),
    "shared names": (lambda: meta({"a": {"b": 1.0}, "a.b": 2.0}), ["['loss.a.b']", "Rename", "dot"]),
    "outside of its domain": (
        lambda: meta(of=training(loss_domains={"l2": Positive(), "*": Unit()})),
        ["loss.weights[0]", "is 1", "below 1", "loss_domains"],
    ),
    "one alone, outside of its domain": (
        lambda: meta(-0.5, of=training(loss_domains={"*": Positive()})),
        ["leaf loss is -0.5", "zero or more"],
    ),
    "a domain of none": (
        lambda: meta(of=training(loss_domains={"l1": Positive()})),
        ["'l1'", "['l2', 'weights']", "Correct the pattern"],
    ),
    "a domain behind another": (
        lambda: meta(of=training(loss_domains={"*": Positive(), "l2": Unit()})),
        ["'l2'", "first for none"],
    ),
    "a domain where there are no leaves": (
        lambda: meta(None, of=without_leaves(loss_domains={"l2": Positive()})),
        ["'l2'", "[]"],
    ),
    "a domain's class": (
        lambda: training(loss_domains={"l2": Positive}),
        ["'l2'", "Positive", "Pass Positive()"],
    ),
    "one domain for all": (lambda: training(loss_domains=cast(Any, Positive())), ["loss_domains", '{"l2"']),
    "a schedule of none": (
        lambda: meta(of=training(optimizer=Scheduled(SGD(), 3, ("loss.l1",)))),
        ["'loss.l1'", "['loss.l2', 'loss.weights']", "Name one"],
    ),
    "a schedule where there are no leaves": (
        lambda: meta(None, of=without_leaves(optimizer=Scheduled(SGD(), 3, ("loss.l2",)))),
        ["'loss.l2'", "[]"],
    ),
    "a schedule of another length": (
        lambda: meta(of=training(optimizer=Scheduled(SGD(), 4, ("loss.weights",)))),
        ["4 entries", "'weights'", "(3,)", "first dimension"],
    ),
    "leaves for a loss without": (
        lambda: meta(of=without_leaves()),
        ["['weights', 'l2']", "no argument", "loss(params, batch, leaves)", "without a default value"],
    ),
    "no leaves for a loss with": (lambda: meta(None), ["init_meta got none", "loss={...}", "loss=()"]),
}

READ = {
    "one that is not used": (
        lambda: estimate(given=leaves | {"l1": 0.1}),
        ["leaves loss.l1 of", "loss.weights, loss.l2, loss.l1", "Correct the loss", "init_meta(loss=...)"],
    ),
    "one that is only added": (
        lambda: estimate(loss=lambda p, b, leaves: (leaves["weights"] * p["w"]).sum() + leaves["l2"]),
        ["leaves loss.l2 of", "its gradient does not depend"],
    ),
    "one whose number is taken out": (lambda: estimate(loss=numbers_alone), ["loss.l2", "float()"]),
    "one of many": (
        lambda: estimate(given=leaves | {f"l{i}": 1.0 for i in range(3, 99)}),
        ["loss.l3", "(96 in all)", "(98 in all)"],
    ),
    "one that is not used while training": (
        lambda: Online(training(), Adam(), ("loss",)).init(
            meta(leaves | {"l1": 0.1}), training().init(params), torch.ones(3)
        ),
        ["leaves loss.l1 of"],
    ),
    "one that is written into": (lambda: estimate(loss=writing), ["in place", "leaf of meta", "new tensor"]),
    "a float in its place": (
        lambda: replaced(0.3),
        ["loss.l2 is 0.3, a float", "Pass torch.tensor(0.3)"],
    ),
    "an integer in its place": (
        lambda: replaced(torch.tensor(1)),
        ["loss.l2 is torch.int64", "Pass its float()"],
    ),
    "an index beyond the weights": (
        lambda: taken(lambda x, i: x[i], torch.ones(5), torch.tensor([0, 1, 7])),
        ["index 7", "size 5", "no weight", "as long as the data"],
    ),
    "an index below the weights": (
        lambda: taken(lambda x, i: x[i], torch.ones(5), torch.tensor([0, 1, -9])),
        ["index -9", "size 5"],
    ),
    "an index to gather": (
        lambda: taken(lambda x, i: x.gather(0, i), torch.ones(5), torch.tensor([0, 1, 7])),
        ["index 7", "size 5"],
    ),
    "an index to select": (
        lambda: taken(lambda x, i: x.index_select(0, i), torch.ones(5), torch.tensor([0, 1, 7])),
        ["index out of range", "no weight"],
    ),
    "an index to take": (
        lambda: taken(lambda x, i: x.take(i), torch.ones(5), torch.tensor([0, 1, 7])),
        ["index out of range", "no weight"],
    ),
    "an index to embed": (
        lambda: taken(lambda x, i: F.embedding(i, x), torch.ones(5, 3), torch.tensor([7])),
        ["index out of range", "no weight"],
    ),
    "a carry that requires a gradient": (
        lambda: estimate(carry=training().init({"w": torch.ones(3, requires_grad=True)})),
        ["params.w requires grad", "detach()", "estimate.start"],
    ),
    "an outer loss of meta alone": (
        lambda: estimate(outer=lambda carry, meta: meta.loss["l2"]),
        ["outer loss", "does not depend on what training moves", "params of the carry"],
    ),
    "an outer loss of meta alone, forward": (
        lambda: estimate(forward, outer=lambda carry, meta: meta.loss["l2"]),
        ["does not depend on what training moves"],
    ),
    "an outer loss of meta alone, the whole graph": (
        lambda: estimate(autograd, outer=lambda carry, meta: meta.loss["l2"]),
        ["does not depend on what training moves"],
    ),
    "an outer loss of meta alone, for particles": (
        lambda: estimate(
            evolution,
            outer=lambda carry, meta: meta.loss["l2"],
            carry=evolution.init(training().init(params), torch.Generator()),
        ),
        ["does not depend on what training moves"],
    ),
}


@pytest.mark.parametrize("estimator", [adjoint, autograd, forward], ids=["adjoint", "autograd", "forward"])
def test_a_number_for_all_weights_may_be_an_expanded_one(estimator):
    one, three = (
        estimate(estimator, given=leaves | {"weights": x}) for x in (torch.ones(1).expand(3), torch.ones(3))
    )
    assert_same_bits(one.grads, three.grads)


def test_an_index_into_something_else_is_pythons_to_refuse():
    with pytest.raises(IndexError, match=r"^tuple index out of range$"):
        taken(lambda x, batch: x * batch[1], torch.ones(3), (torch.ones(3),))


def test_numbers_of_any_kind_are_taken_in_the_precision_of_the_parameters():
    single = {"w": torch.ones(3, dtype=torch.float32)}
    given = {"a": 1, "b": numpy.float32(0.5), "c": numpy.float64(0.5), "d": torch.ones(2)}
    made = training().init_meta(single, loss=given, lr=0.1).loss
    assert {k: x.dtype for k, x in made.items()} == dict.fromkeys(given, torch.float32)
    assert [x.sum().item() for x in made.values()] == [1.0, 0.5, 0.5, 2.0]


@pytest.mark.parametrize(("act", "words"), list(MADE.values()), ids=list(MADE))
def test_leaves_that_cannot_be_get_a_clear_sentence(act, words):
    assert_clear(act, words)


@pytest.mark.parametrize(("act", "words"), list(READ.values()), ids=list(READ))
def test_leaves_that_are_not_read_as_they_should_get_a_clear_sentence(act, words):
    assert_clear(act, words, (ValueError, TypeError, IndexError, NotImplementedError))
