"""Pure optimizers against torch.optim and higher."""

from functools import partial

import higher
import pytest
import torch
from problems import OPTIMIZERS, Setting, assert_near, assert_same_bits, every, mlp
from torch import Tensor
from torch.func import grad, vjp

from metafop import SGD, Adam, Momentum, Training, functional, tree

EXACT = {name: s for name, s in OPTIMIZERS.items() if not isinstance(s.optimizer, Adam)}

# higher adds eps before the bias correction, torch and we after it: an eps too small to matter.
DIFFERENTIABLE = {k: s for k, s in EXACT.items() if k in ("sgd", "heavy ball", "nesterov, decayed")} | {
    "adam": Setting(
        Adam(),
        {"lr": 0.02, "betas": (0.7, 0.9), "eps": 1e-30},
        partial(torch.optim.Adam, lr=0.02, betas=(0.7, 0.9), eps=1e-30),
    )
}


def bend(params, batch):
    """A loss that is not quadratic, of a matrix, a vector and a scalar."""
    hidden = torch.tanh(params["matrix"] @ batch + params["vector"])
    return torch.log1p((params["scalar"] * hidden - 0.3).square().sum()) + 0.1 * hidden.exp().mean()


def start(generator, dtype):
    params = {"matrix": (4, 3), "vector": (4,), "scalar": ()}
    return {k: torch.randn(shape, generator=generator, dtype=dtype) for k, shape in params.items()}


def batches(generator, dtype, steps=100):
    return torch.randn(steps, 3, generator=generator, dtype=dtype)


def trained(optimizer, hyper, params, data):
    training = Training(functional.plain(bend), optimizer)
    meta, carry = training.init_meta(params, **hyper._asdict()), training.init(params)
    for batch in data:
        carry, _ = training.step(meta, carry, batch)
    return carry.params


def trained_by_torch(twin, params, data):
    leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
    optimizer = twin(leaves)
    for batch in data:
        optimizer.zero_grad()
        bend(leaves, batch).backward()
        optimizer.step()
    return {k: p.detach() for k, p in leaves.items()}


@every("setting", OPTIMIZERS)
def test_a_hundred_steps_are_those_of_torch(setting, generator):
    params, data = start(generator, torch.float64), batches(generator, torch.float64)
    ours = trained(setting.optimizer, setting.hyper(), params, data)
    theirs = trained_by_torch(lambda p: setting.twin(p.values()), params, data)
    assert_near(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every("setting", EXACT)
def test_a_hundred_steps_of_descent_are_those_of_torch_bit_for_bit(setting, dtype, generator):
    params, data = start(generator, dtype), batches(generator, dtype)
    ours = trained(setting.optimizer, setting.hyper(), params, data)
    theirs = trained_by_torch(lambda p: setting.twin(p.values()), params, data)
    assert_same_bits(ours, theirs)


def test_adam_in_float32_stays_with_torch(generator):
    setting = OPTIMIZERS["adam, decayed"]
    params, data = start(generator, torch.float32), batches(generator, torch.float32)
    ours = trained(setting.optimizer, setting.hyper(), params, data)
    theirs = trained_by_torch(lambda p: setting.twin(p.values()), params, data)
    assert_near(ours, theirs, rtol=1e-5)


@every("setting", OPTIMIZERS)
def test_a_learning_rate_by_name_is_torchs_by_group(setting, generator):
    params, data = start(generator, torch.float64), batches(generator, torch.float64)
    rates = {"scalar": 0.001, "vector": 0.02, "matrix": 0.05}
    ours = trained(setting.optimizer, setting.hyper(lr=rates), params, data)
    theirs = trained_by_torch(
        lambda p: setting.twin([{"params": [p[k]], "lr": lr} for k, lr in rates.items()]), params, data
    )
    assert_near(ours, theirs, rtol=1e-12)


@every("setting", OPTIMIZERS)
def test_one_value_is_that_value_for_every_name(setting, generator):
    params, data = start(generator, torch.float64), batches(generator, torch.float64, steps=10)
    by_name = {field: dict.fromkeys(params, value) for field, value in setting.values.items()}
    ours = trained(setting.optimizer, setting.hyper(), params, data)
    assert_same_bits(trained(setting.optimizer, setting.hyper(**by_name), params, data), ours)


@every("setting", OPTIMIZERS)
def test_the_derivative_in_one_value_is_the_sum_of_those_by_name(setting, generator):
    params, direction, cotangent = (start(generator, torch.float64) for _ in range(3))
    optimizer, opt = setting.optimizer, setting.optimizer.init(params)
    by_name = tree.map(lambda x: dict.fromkeys(params, x), setting.hyper())
    whole, toward = optimizer.pullback(setting.hyper(), params, opt, direction, cotangent)
    apart, toward_apart = optimizer.pullback(by_name, params, opt, direction, cotangent)
    summed = tree.map(
        lambda d: torch.stack(list(d.values())).sum(), apart, is_leaf=lambda x: isinstance(x, dict)
    )
    assert_same_bits((whole, toward), (summed, toward_apart))


def by_higher(problem, twin, lr, steps):
    optimizer = higher.get_diff_optim(
        twin(problem.model.parameters()), problem.model.parameters(), override={"lr": [lr]}
    )
    params = [p.clone().requires_grad_() for p in problem.params.values()]

    def loss(params, batch):
        return problem.loss(dict(zip(problem.params, params, strict=True)), problem.buffers, batch)[0]

    for batch in problem.batches[:steps]:
        params = list(optimizer.step(loss(params, batch), params=params))
    return torch.autograd.grad(loss(params, problem.batches[steps]), lr)[0]


@pytest.mark.parametrize("steps", [1, 3])
@every("setting", DIFFERENTIABLE)
def test_the_derivative_through_training_in_the_learning_rate_is_that_of_higher(setting, steps, generator):
    problem = mlp(generator)
    training = problem.training(setting.optimizer)

    def final(lr):
        meta, carry = (
            training.init_meta(problem.params, **setting.hyper(lr=lr)._asdict()),
            training.init(problem.params),
        )
        for batch in problem.batches[:steps]:
            carry, _ = training.step(meta, carry, batch)
        return training.evaluate(meta, carry, problem.batches[steps]).value

    lr = torch.tensor(setting.values["lr"], requires_grad=True)
    ours = grad(final)(lr.detach())
    torch.testing.assert_close(ours, by_higher(problem, setting.twin, lr, steps), rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [1, 4])
def test_adam_is_finite_and_still_where_a_gradient_has_always_been_zero(dtype, steps):
    adam, params = Adam(), {"w": torch.ones(3, dtype=dtype)}
    direction = {"w": torch.tensor([0.0, 2.0, 0.0], dtype=dtype)}
    hyper, opt, new = adam.hyper(lr=0.1), adam.init(params), params
    for _ in range(steps - 1):
        new, opt = adam.update(hyper, new, opt, direction)

    def update(hyper, direction):
        return adam.update(hyper, new, opt, direction)[0]

    moved, pulled = update(hyper, direction), vjp(update, hyper, direction)[1](params)
    written = adam.pullback(hyper, new, opt, direction, params)
    assert torch.equal(moved["w"][[0, 2]], params["w"][[0, 2]])
    assert tree.all_finite((moved, pulled, written))


@every("setting", OPTIMIZERS)
def test_the_numbers_are_the_same_whether_a_derivative_may_be_taken_or_not(setting, generator):
    params, (first, second) = start(generator, torch.float64), batches(generator, torch.float64, steps=2)
    directions = [grad(bend)(params, first), grad(bend)(params, second)]
    directions[0]["vector"][0] = directions[1]["vector"][0] = 0.0  # so that Adam divides by eps alone

    def twice(hyper):
        new, opt = setting.optimizer.update(hyper, params, setting.optimizer.init(params), directions[0])
        toward = setting.optimizer.toward(hyper, new, opt, directions[1], params)
        return setting.optimizer.update(hyper, new, opt, directions[1]), toward

    followed = tree.map(lambda x: x.requires_grad_(), setting.hyper())
    assert_same_bits(tree.map(Tensor.detach, twice(followed)), twice(setting.hyper()))


@every("setting", OPTIMIZERS)
def test_every_domain_is_that_of_a_field(setting):
    assert set(setting.optimizer.domains) == set(setting.hyper()._fields)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@every("setting", OPTIMIZERS)
def test_parameters_and_state_stay_in_their_precision(setting, dtype, generator):
    training = Training(functional.plain(bend), setting.optimizer)
    params, batch = start(generator, dtype), batches(generator, dtype, steps=1)[0]
    carry = training.init(params)
    after, _ = training.step(training.init_meta(params, **setting.hyper()._asdict()), carry, batch)
    assert tree.map(lambda x: x.dtype, after) == tree.map(lambda x: x.dtype, carry)


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_decay_momentum_is_descent(nesterov, generator):
    params, data = start(generator, torch.float64), batches(generator, torch.float64)
    ball = Momentum(nesterov)
    still = trained(ball, ball.hyper(lr=0.1, momentum=0.0, weight_decay=0.01), params, data)
    assert_same_bits(still, trained(SGD(), SGD().hyper(lr=0.1, weight_decay=0.01), params, data))


def test_adam_in_half_precision_does_not_divide_by_an_eps_that_rounds_to_zero():
    params, zero = (
        {"w": torch.ones(2, dtype=torch.float16)},
        {"w": torch.tensor([0.0, 1.0], dtype=torch.float16)},
    )
    new, _ = Adam().update(Adam().hyper(lr=0.01), params, Adam().init(params), zero)
    torch.testing.assert_close(new["w"], torch.tensor([1.0, 0.99], dtype=torch.float16))
