"""The derivative in the start, over many tasks at once, is that of higher, task by task (MAML)."""

import math

import pytest
import torch
from problems import assert_near, every
from torch import nn
from torch.func import vmap
from torch.nn.functional import mse_loss

from metafop import SGD, Adam, Momentum, Tasks, Training, functional
from metafop.hypergradients import Adjoint, adjoint, autograd
from metafop.unrolled import Unrolled

TASKS, SHOTS, LR = 4, 10, 0.01
ESTIMATORS = {"adjoint": adjoint, "autograd": autograd, "sqrt": Adjoint(keep="sqrt")}
OPTIMIZERS = {
    "sgd": (SGD(), {}, {}),
    "heavy ball": (Momentum(), {"momentum": 0.9}, {"momentum": 0.9}),
}


def sinusoids(generator):
    """Return points of some sinusoids, to adapt to and to be asked for: (tasks, shots, 1)."""
    amplitude, phase = torch.rand(2, TASKS, 1, 1, generator=generator)
    x = 10 * torch.rand(2, TASKS, SHOTS, 1, generator=generator) - 5
    y = (0.1 + 4.9 * amplitude) * torch.sin(x - math.pi * phase)
    return (x[0], y[0]), (x[1], y[1])


def network(generator):
    net = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
    for p in net.parameters():
        nn.init.uniform_(p, -0.3, 0.3, generator=generator)
    return net


def squared_error(net, examples):
    return mse_loss(net(examples[0]), examples[1])


def by_higher(net, support, query, steps, **settings):
    higher = pytest.importorskip("higher")
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, **settings)
    net.zero_grad()
    for x, y, x_asked, y_asked in zip(*support, *query, strict=True):
        with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False) as (copied, differentiable):
            for _ in range(steps):
                differentiable.step(squared_error(copied, (x, y)))
            (squared_error(copied, (x_asked, y_asked)) / TASKS).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def outer_loss(loss, query):
    return lambda carry: vmap(lambda params, asked: loss(params, {}, asked)[0])(carry.params, query).mean()


@every("estimator", ESTIMATORS)
@every("optimizer, values, settings", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 5])
def test_the_derivative_in_the_start_of_many_tasks_is_that_of_higher(
    estimator, optimizer, values, settings, steps, generator
):
    net, (support, query) = network(generator), sinusoids(generator)
    loss, params, _ = functional.from_module(net, squared_error)
    training = Training(loss, optimizer)
    tasks, meta = Tasks(training, TASKS), training.init_meta(params, lr=LR, **values)
    estimate = estimator(tasks, outer_loss(loss, query), meta, tasks.init(params), steps * [support])
    found = {name: g.sum(0) for name, g in estimate.start.params.items()}
    assert_near(found, by_higher(net, support, query, steps, **settings), rtol=1e-10)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_start_that_is_learned_goes_where_it_goes_with_higher(steps, generator):
    net = network(generator)
    loss, params, _ = functional.from_module(net, squared_error)
    training = Training(loss, SGD())
    tasks, meta = Tasks(training, TASKS), training.init_meta(params, lr=LR)
    learner = Unrolled(tasks, Adam(), ("start",))
    outer_meta, state = learner.init_meta(meta, params, lr=1e-3), learner.init(meta, params)
    outer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(5):
        support, query = sinusoids(generator)
        by_higher(net, support, query, steps)
        outer.step()
        carry, batches = tasks.init(params), steps * [support]
        state, _ = learner.step(outer_meta, state, outer_loss(loss, query), carry, batches)
    assert_near(state.start, dict(net.named_parameters()), rtol=1e-9)
