"""The hypergradient through several steps against those of higher and torchopt, which record the whole graph."""

from functools import partial

import pytest
import torch
from problems import MODELS, assert_near, batch_loss, every

from metafop import SGD, Adam, Momentum
from metafop.hypergradients import adjoint

NESTEROV = Momentum(nesterov=True)

# Ours, its values besides lr, torch's twin, and how higher is told of the values that it can differentiate in:
# it takes the root of β2's correction outside of the graph. It adds eps before the correction, torch and we
# after it: an eps too small to matter.
HIGHER = {
    "sgd": (SGD(), {}, torch.optim.SGD, lambda v: {}),
    "heavy ball": (
        Momentum(),
        {"decay": 0.9},
        partial(torch.optim.SGD, momentum=0.9),
        lambda v: {"momentum": [v["decay"]]},
    ),
    "nesterov": (
        NESTEROV,
        {"decay": 0.8},
        partial(torch.optim.SGD, momentum=0.8, nesterov=True),
        lambda v: {"momentum": [v["decay"]]},
    ),
    "adam": (
        Adam(),
        {"beta1": 0.7, "beta2": 0.9, "eps": 1e-30},
        partial(torch.optim.Adam, eps=1e-30),
        lambda v: {"betas": [(v["beta1"], 0.9)]},
    ),
}

# Ours, its values besides lr, and torchopt's for one parameter: values that multiply it differentiates in, those
# that weigh a sum (`add(…, alpha=…)`) it takes as plain numbers.
TORCHOPT = {
    "sgd": (SGD(), {}, lambda torchopt, lr, v: torchopt.sgd(lr)),
    "heavy ball": (
        Momentum(),
        {"decay": 0.9},
        lambda torchopt, lr, v: torchopt.sgd(lr, momentum=v["decay"], moment_requires_grad=True),
    ),
    "nesterov": (
        NESTEROV,
        {"decay": 0.8},
        lambda torchopt, lr, v: torchopt.sgd(lr, momentum=0.8, nesterov=True),
    ),
    "adam": (
        Adam(),
        {"beta1": 0.7, "beta2": 0.9, "eps": 1e-3},
        lambda torchopt, lr, v: torchopt.adam(lr, betas=(0.7, 0.9), eps=1e-3),
    ),
}


def variables(problem, values):
    """Return a learning rate for each parameter, each another, and the other values, all to differentiate in."""
    lr = {k: torch.tensor(0.02 * (i + 1), requires_grad=True) for i, k in enumerate(problem.params)}
    return lr, {k: torch.tensor(v, requires_grad=True) for k, v in values.items()}


def derivatives(value, lr, others):
    """Return the derivatives in lr, and in those of the others that the value depends on."""
    found = torch.autograd.grad(value, [*lr.values(), *others.values()], allow_unused=True)
    rest = dict(zip(others, found[len(lr) :], strict=True))
    return {"lr": dict(zip(lr, found, strict=False))} | {k: d for k, d in rest.items() if d is not None}


def by_higher(problem, twin, lr, others, override):
    higher = pytest.importorskip("higher")
    optimizer = twin([{"params": [p]} for p in problem.model.parameters()], lr=0.1)
    override = {"lr": list(lr.values())} | override(others)
    *batches, outer = problem.batches
    with higher.innerloop_ctx(problem.model, optimizer, override=override) as (model, differentiable):
        for batch in batches:
            differentiable.step(batch_loss(model, batch))
        return derivatives(batch_loss(model, outer), lr, others)


def by_torchopt(problem, make, lr, others):
    torchopt = pytest.importorskip("torchopt")
    params = {k: p.clone().requires_grad_() for k, p in problem.params.items()}
    optimizers = {k: make(torchopt, lr[k], others) for k in params}
    states = {k: optimizers[k].init((p,)) for k, p in params.items()}
    *batches, outer = problem.batches
    for batch in batches:
        value, _ = problem.loss(params, problem.buffers, batch)
        grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
        for (k, p), g in zip(params.items(), grads, strict=True):
            updates, states[k] = optimizers[k].update((g,), states[k], inplace=False)
            (params[k],) = torchopt.apply_updates((p,), updates, inplace=False)
    return derivatives(problem.loss(params, problem.buffers, outer)[0], lr, others)


def ours(problem, optimizer, lr, others):
    training = problem.training(optimizer)
    hyper = optimizer.hyper(**{"lr": {k: r.detach() for k, r in lr.items()}}, **{k: v.detach() for k, v in others.items()})
    *batches, outer = problem.batches

    def outer_loss(carry):
        return problem.loss(carry.params, carry.buffers, outer)[0]

    meta, carry = training.meta(problem.params, hyper), training.init(problem.params, problem.buffers)
    return adjoint(training, outer_loss, meta, carry, batches).grads.hyper._asdict()


@every("make", MODELS)
@every("optimizer, values, twin, override", HIGHER)
def test_the_hypergradient_is_that_of_higher(optimizer, values, twin, override, make, generator):
    problem = make(generator)
    lr, others = variables(problem, values)
    theirs = by_higher(problem, twin, lr, others, override)
    found = ours(problem, optimizer, lr, others)
    print({k: v for k, v in theirs.items()})
    assert_near({k: found[k] for k in theirs}, theirs, rtol=1e-10)


@every("make", MODELS)
@every("optimizer, values, twin", TORCHOPT)
def test_the_hypergradient_is_that_of_torchopt(optimizer, values, twin, make, generator):
    problem = make(generator)
    lr, others = variables(problem, values)
    theirs = by_torchopt(problem, twin, lr, others)
    found = ours(problem, optimizer, lr, others)
    print({k: v for k, v in theirs.items()})
    assert_near({k: found[k] for k in theirs}, theirs, rtol=1e-10)
