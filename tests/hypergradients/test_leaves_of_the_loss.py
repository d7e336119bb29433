"""Derivatives in leaves of the loss, in the start and in all else are those of a loop written by hand."""

from dataclasses import replace

import torch
from leaves import FORMS, SCHEDULED, unrolled
from problems import ALL_MODELS, OPTIMIZERS, Setting, assert_near, convnet, every, mlp, moved
from torch.func import vmap

from metafop import LowRank, Momentum, ReversibleMomentum, Scheduled, tree
from metafop.hypergradients import Adjoint, Forward, Truncated, adjoint, autograd, reversible

HEAVY = OPTIMIZERS["heavy ball, decayed"]
FOUR = {
    k: OPTIMIZERS[k] for k in ("sgd, decayed", "heavy ball, decayed", "nesterov, decayed", "adam, decayed")
}
THREE = {"adjoint": adjoint, "over forward": Adjoint(over="forward"), "autograd": autograd}
ALL = THREE | {
    "sqrt": Adjoint("sqrt"),
    "log": Adjoint("log"),
    "one window": Truncated(4),
    "forward": Forward(),
    "forward, start too": Forward(("hyper", "loss", "start")),
}


def assert_by_hand(estimate, problem):
    """Compare with the loop, in units of each leaf's largest number, or of a thousandth of that of all."""
    expected = problem.differentiated()
    assert_near(estimate.value, expected.value, rtol=1e-12)
    assert_near(estimate.carry.params, expected.params, rtol=1e-12, size=1.0)
    assert_near(estimate.grads, expected.grads, rtol=1e-10, size=1e-3 * largest(expected.grads))
    size = 1e-3 * largest(expected.start)
    if estimate.start:
        assert_near(estimate.start.params, expected.start.params, rtol=1e-10, size=size)
    if estimate.start and "tangents" not in estimate.info:  # Forward learns the parameters of the start alone
        assert_near(estimate.start.opt, expected.start.opt, rtol=1e-10, size=size)
    assert estimate.info["notes"] == ()


def largest(x):
    return max(float(leaf.abs().max()) for leaf in tree.leaves(x))


@every("form", FORMS)
@every("make", ALL_MODELS)
@every("estimator", {"adjoint": adjoint, "autograd": autograd})
def test_every_form_of_leaves_on_every_model(estimator, make, form, generator):
    problem = unrolled(make, form, HEAVY, generator)
    assert_by_hand(estimator(*problem.given), problem)


@every("setting", FOUR)
@every("estimator", THREE | {"forward": Forward()})
def test_every_optimizer_with_preconditioners_and_the_start_of_its_state(estimator, setting, generator):
    problem = unrolled(mlp, FORMS["nested"], setting, generator, LowRank(2))
    assert_by_hand(estimator(*problem.given), problem)


@every("estimator", ALL)
@every("make", {"mlp": mlp, "convnet": convnet})
def test_with_the_masks_of_dropout(make, estimator, generator):
    problem = unrolled(make, FORMS["weights"], HEAVY, generator, dropout=0.3)
    assert_by_hand(estimator(*problem.given), problem)


@every("estimator", ALL)
@every("fields", {"a leaf": ("loss.l2",), "a leaf and lr": ("lr", "loss.l2")})
def test_each_step_is_given_its_entry_of_what_is_scheduled(fields, estimator, generator):
    lr = [0.1, 0.05, 0.02] if "lr" in fields else 0.1
    values = {"lr": lr, "momentum": 0.5, "weight_decay": 0.02}
    setting = Setting(Scheduled(Momentum(), 3, fields), values, HEAVY.twin)
    problem = unrolled(mlp, SCHEDULED, setting, generator)
    estimate = estimator(*problem.given)
    assert_by_hand(estimate, problem)
    assert estimate.grads.loss["l2"][0] == 0  # of the step before the first
    assert (estimate.grads.loss["l2"][1:] != 0).all()


def test_forward_goes_on_from_window_to_window_with_leaves_and_the_start(generator):
    problem = unrolled(convnet, FORMS["weights"], OPTIMIZERS["adam, short"], generator)
    training, outer_loss, meta, carry, batches = problem.given
    ahead = ALL["forward, start too"]
    first = ahead(training, outer_loss, meta, ahead.init(carry), batches[:1])
    second = ahead(training, outer_loss, meta, first.carry, batches[1:])
    assert_by_hand(second._replace(carry=second.carry.carry), problem)


@every("form", FORMS)
def test_steps_that_torch_autograd_records_are_a_loop_too(form, generator):
    problem = unrolled(mlp, form, HEAVY, generator)
    training, outer_loss, *rest, batches = problem.given
    meta, carry = tree.map(lambda x: x.clone().requires_grad_(), tuple(rest))
    after = carry
    for batch in batches:
        after, _ = training.step(meta, after, batch)
    found = torch.autograd.grad(outer_loss(after), tree.leaves((meta, carry)))
    expected = problem.differentiated()
    size = 1e-3 * largest(expected.grads)
    assert_near(list(found), tree.leaves((expected.grads, expected.start)), rtol=1e-10, size=size)


@every("form", FORMS)
@every("make", {"mlp": mlp, "convnet": convnet})
def test_undone_in_fixed_point(make, form, generator):
    """Its units are so small that what it rounds is no more than any rounding."""
    ball = Setting(ReversibleMomentum(bits=47), HEAVY.values, HEAVY.twin)
    problem = unrolled(make, form, ball, generator)
    assert_by_hand(reversible(*problem.given), problem)


@every("estimator", ALL)
def test_an_outer_loss_may_read_meta_too(estimator, generator):
    problem = unrolled(mlp, FORMS["a penalty"], HEAVY, generator)
    training, outer, *rest = problem.given

    def read(value, meta):
        return value * (1 + meta.loss.square()) + meta.hyper.lr

    estimate = estimator(training, lambda carry, meta: read(outer(carry), meta), *rest)
    by_hand = problem.outer_by_hand
    assert_by_hand(estimate, replace(problem, outer_by_hand=lambda *given: read(by_hand(*given), given[1])))


@every("form", {k: FORMS[k] for k in ("labels", "nested")})
@every("estimator", THREE | {"forward": Forward(("hyper", "loss", "start"))})
def test_vmap_over_leaves_and_the_start_is_a_loop_over_them(estimator, form, generator):
    training, outer_loss, meta, carry, batches = unrolled(mlp, form, HEAVY, generator).given
    starts, leaves = ([moved(x, generator, 0.1) for _ in range(2)] for x in (carry.params, meta.loss))

    def estimated(start, leaves):
        given = (training, outer_loss, meta._replace(loss=leaves), carry._replace(params=start), batches)
        return estimator(*given)[:4]

    found = vmap(estimated)(tree.stack(starts), tree.stack(leaves))
    expected = tree.stack([estimated(*each) for each in zip(starts, leaves, strict=True)])
    assert_near(found, expected, rtol=1e-11, size=1e-2)


COMPILED = {"inputs of a conv net": (convnet, "inputs", 0.0), "nested, with dropout": (mlp, "nested", 0.3)}


@every("make, form, dropout", COMPILED)
def test_compiled(make, form, dropout, generator):
    problem = unrolled(make, FORMS[form], HEAVY, generator, dropout=dropout)
    assert_by_hand(Adjoint(compile=True)(*problem.given), problem)
