"""The hypergradient through several steps is that of higher and of torchopt, which record the whole graph."""

from functools import partial

import pytest
import torch
from problems import MODELS, assert_near, batch_loss, every
from torch.nn.functional import cross_entropy

from metafop import SGD, Adam, Momentum, Training, functional, tree
from metafop.hypergradients import adjoint

# Ours and its values besides lr, torch's optimizer, and how higher is told to differentiate in some of these.
# Not in β2, of whose bias correction it takes the root outside of the graph. And it adds eps before that
# correction, torch and we after it: an eps too small to matter.
# Not in beta2: higher takes the number out of it for the bias correction, and its derivative is wrong.
HIGHER = {
    "sgd": (SGD(), {}, torch.optim.SGD, {}),
    "heavy ball": (
        Momentum(),
        {"momentum": 0.9},
        partial(torch.optim.SGD, momentum=0.9),
        {"momentum": lambda momentum: {"momentum": [momentum]}},
    ),
    "nesterov": (
        Momentum(nesterov=True),
        {"momentum": 0.8},
        partial(torch.optim.SGD, momentum=0.8, nesterov=True),
        {"momentum": lambda momentum: {"momentum": [momentum]}},
    ),
    "adam": (
        Adam(),
        {"betas": (0.7, 0.9), "eps": 1e-30},
        partial(torch.optim.Adam, eps=1e-30),
        {"beta1": lambda beta1: {"betas": [(beta1, 0.9)]}},
    ),
}

# Ours and its values besides lr, torchopt's optimizer of one parameter, and the values that it differentiates
# in: those that multiply. It refuses a tensor for weights in sums, Nesterov's momentum and Adam's betas.
TORCHOPT = {
    "sgd": (SGD(), {}, lambda torchopt, lr: torchopt.sgd(lr), ()),
    "heavy ball": (
        Momentum(),
        {"momentum": 0.9},
        lambda torchopt, lr, momentum: torchopt.sgd(lr, momentum=momentum, moment_requires_grad=True),
        ("momentum",),
    ),
    "nesterov": (
        Momentum(nesterov=True),
        {"momentum": 0.8},
        lambda torchopt, lr: torchopt.sgd(lr, momentum=0.8, nesterov=True, moment_requires_grad=True),
        (),
    ),
    "adam": (
        Adam(),
        {"betas": (0.7, 0.9), "eps": 1e-3},
        lambda torchopt, lr: torchopt.adam(lr, betas=(0.7, 0.9), eps=1e-3, moment_requires_grad=True),
        (),
    ),
}


def rates(problem):
    """Return a learning rate for each parameter, each another."""
    return {k: torch.tensor(0.02 * (i + 1), requires_grad=True) for i, k in enumerate(problem.params)}


def _learned(names, values):
    return {k: torch.tensor(values[k], requires_grad=True) for k in names}


def by_higher(problem, twin, lr, learned, overrides):
    higher = pytest.importorskip("higher")
    optimizer = twin([{"params": [p]} for p in problem.model.parameters()], lr=0.1)
    override = {"lr": list(lr.values())}
    for name, value in learned.items():
        override |= overrides[name](value)
    *batches, outer = problem.batches
    with higher.innerloop_ctx(problem.model, optimizer, override=override) as (model, differentiable):
        for batch in batches:
            differentiable.step(batch_loss(model, batch))
        return derivatives(batch_loss(model, outer), lr, learned)


def by_torchopt(problem, twin, lr, learned):
    torchopt = pytest.importorskip("torchopt")
    optimizers = {k: twin(torchopt, rate, **learned) for k, rate in lr.items()}
    params = {k: p.clone().requires_grad_() for k, p in problem.params.items()}
    states = {k: optimizers[k].init((p,)) for k, p in params.items()}
    *batches, outer = problem.batches
    for batch in batches:
        value, _ = problem.loss(params, problem.buffers, batch)
        grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
        for (k, p), g in zip(list(params.items()), grads, strict=True):
            updates, states[k] = optimizers[k].update((g,), states[k], inplace=False)
            (params[k],) = torchopt.apply_updates((p,), updates, inplace=False)
    return derivatives(problem.loss(params, problem.buffers, outer)[0], lr, learned)


def derivatives(value, lr, learned):
    found = torch.autograd.grad(value, [*lr.values(), *learned.values()])
    return {"lr": dict(zip(lr, found, strict=False))} | dict(zip(learned, found[len(lr) :], strict=True))


def by_us(problem, optimizer, lr, values):
    training = problem.training(optimizer)
    *batches, outer = problem.batches

    def outer_loss(carry):
        return problem.loss(carry.params, carry.buffers, outer)[0]

    meta, carry = (
        training.init_meta(problem.params, lr=tree.map(torch.detach, lr), **values),
        training.init(problem.params, problem.buffers),
    )
    grads = adjoint(training, outer_loss, meta, carry, batches).grads.hyper._asdict()
    return grads | {"beta1": grads["betas"][0]} if "betas" in grads else grads


@every("make", MODELS)
@every("optimizer, values, twin, overrides", HIGHER)
def test_the_hypergradient_is_that_of_higher(optimizer, values, twin, overrides, make, generator):
    problem = make(generator)
    lr, learned = rates(problem), _learned(overrides, values | {"beta1": 0.7})
    theirs = by_higher(problem, twin, lr, learned, overrides)
    ours = by_us(problem, optimizer, lr, values)
    assert_near({k: ours[k] for k in theirs}, theirs, rtol=1e-10)


@every("make", MODELS)
@every("optimizer, values, twin, learns", TORCHOPT)
def test_the_hypergradient_is_that_of_torchopt(optimizer, values, twin, learns, make, generator):
    problem = make(generator)
    lr, learned = rates(problem), _learned(learns, values)
    theirs = by_torchopt(problem, twin, lr, learned)
    ours = by_us(problem, optimizer, lr, values)
    assert_near({k: ours[k] for k in theirs}, theirs, rtol=1e-10)


def reweighted(model, batch, weights):
    """Return the loss of examples by weight, with a penalty of the size of the first weight."""
    inputs, labels = batch
    each = cross_entropy(model(inputs), labels, reduction="none")
    return (weights.sigmoid() * each).mean() + weights[0].square() * sum(
        p.square().sum() for p in model.parameters()
    )


@every("make", MODELS)
def test_leaves_of_the_loss_and_the_start_have_the_derivatives_of_higher(make, generator):
    higher = pytest.importorskip("higher")
    problem, leaves = make(generator), 0.5 * torch.randn(6, generator=generator)
    *batches, outer = problem.batches
    weights, heavy = leaves.clone().requires_grad_(), torch.optim.SGD(problem.model.parameters(), 0.1, 0.9)
    with higher.innerloop_ctx(problem.model, heavy, copy_initial_weights=False) as (model, differentiable):
        start = [p.requires_grad_() for p in model.parameters()]
        for batch in batches:
            differentiable.step(reweighted(model, batch, weights))
        theirs = torch.autograd.grad(batch_loss(model, outer), [weights, *start])

    loss, params, buffers = functional.from_module(problem.model, reweighted)
    training = Training(loss, Momentum())
    meta = training.init_meta(params, loss=leaves, lr=0.1, momentum=0.9)

    def outer_loss(carry):
        return problem.loss(carry.params, problem.buffers, outer)[0]

    estimate = adjoint(training, outer_loss, meta, training.init(params, buffers), batches)
    assert_near([estimate.grads.loss, *estimate.start.params.values()], list(theirs), rtol=1e-10)
