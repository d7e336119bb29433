"""An estimate is on the device of the parameters, and reads no number where there is none."""

import pytest
import torch
from fake_gpu import (
    GPU,
    META,
    NEEDS_CUDA,
    ON_A_DEVICE_WITHOUT_NUMBERS,
    FakeGPU,
    devices,
    like,
    mode,
    moved_to,
)
from problems import assert_clear, assert_near, convnet, every, mlp

from metafop import SGD, Adam, Dense, Momentum, Training, Unrolled, tree
from metafop.hypergradients import (
    Adjoint,
    ConjugateGradients,
    Evolution,
    Forward,
    Implicit,
    Neumann,
    Truncated,
    adjoint,
    autograd,
    reversible,
)
from metafop.optimizers import ReversibleMomentum

ESTIMATORS = {
    "adjoint, all kept": Adjoint(keep="all"),
    "adjoint, √T": Adjoint(keep="sqrt"),
    "adjoint, log T": Adjoint(keep="log"),
    "adjoint, a budget": Adjoint(memory=10_000),
    "adjoint, forward": Adjoint(over="forward"),
    "autograd": autograd,
    "forward": Forward(learn=("lr",)),
    "truncated": Truncated(2),
}


@every("estimator", ESTIMATORS)
def test_an_estimate_and_what_is_learned_from_it_are_on_the_device(estimator, generator):
    problem = mlp(generator)
    with FakeGPU():
        problem = moved_to(problem, GPU)
        training = problem.training(Momentum(), Dense())
        meta = training.init_meta(problem.params, lr=0.1, momentum=0.9)
        carry = training.init(problem.params)
        learner = Unrolled(training, Adam(), estimator=estimator, clip=1.0)
        outer_meta, state = learner.init_meta(meta, lr=0.1), learner.init(meta)
        estimate = estimator(training, outer_loss(problem), meta, carry, problem.batches[:3])
        after, _ = learner.step(outer_meta, state, outer_loss(problem), carry, problem.batches[:3])
        assert devices((estimate[:-1], after)) == {GPU}
        assert devices(estimate.info) <= {GPU, torch.device("cpu")}


def outer_loss(problem):
    return lambda carry: problem.loss(carry.params, carry.buffers, problem.batches[-1])[0]


@ON_A_DEVICE_WITHOUT_NUMBERS
def test_an_estimate_with_buffers_is_on_the_device(device, generator):
    problem = convnet(generator)
    with mode(device):
        problem = moved_to(problem, device)
        training = problem.training(SGD())
        meta, carry = (
            training.init_meta(problem.params, lr=0.1),
            training.init(problem.params, problem.buffers),
        )
        estimate = adjoint(training, outer_loss(problem), meta, carry, problem.batches[:3])
        assert devices(estimate[:-1]) == {device}


@ON_A_DEVICE_WITHOUT_NUMBERS
@every("solver", {"conjugate gradients": ConjugateGradients(2, probes=2), "neumann": Neumann(2)})
def test_an_implicit_estimate_is_on_the_device(solver, device, generator):
    problem = mlp(generator)

    def penalized(params, buffers, batch, leaves):
        value, buffers = problem.loss(params, buffers, batch)
        return value + leaves["l2"] * sum(p.square().sum() for p in params.values()), buffers

    with mode(device):
        there = moved_to(problem, device)
        training = Training(penalized, SGD())
        meta = training.init_meta(there.params, loss={"l2": 0.1}, lr=0.1)
        carry = training.init(there.params)
        estimate = Implicit(solver)(training, outer_loss(there), meta, carry, 2 * there.batches[:1])
        assert devices(estimate) - {device} == set()


def test_particles_are_on_the_device_and_their_generator_is_on_the_cpu(generator):
    problem = moved_to(mlp(generator), META)
    training = problem.training(SGD(), Dense())
    meta = training.init_meta(problem.params, lr=0.1)
    evolution = Evolution(pairs=2, learn=("precond", "lr"))
    carry = evolution.init(training.init(problem.params), generator)
    for _ in range(2):
        estimate = evolution(training, outer_loss(problem), meta, carry, problem.batches[:2])
        carry = estimate.carry
        assert devices((estimate.value, estimate.grads, carry.carries, carry.perturbations)) == {META}
        assert devices(carry.rng) == {torch.device("cpu")}


def test_reversible_refuses_a_device_without_numbers_which_it_must_read(generator):
    problem = moved_to(mlp(generator), META)
    training = problem.training(ReversibleMomentum())
    meta, carry = training.init_meta(problem.params, lr=0.1), training.init(problem.params)
    assert_clear(
        lambda: reversible(training, outer_loss(problem), meta, carry, problem.batches),
        ["reversible", "device", "adjoint"],
    )


@every("estimator", {"adjoint": adjoint, "autograd": autograd, "forward": Forward(learn=("lr",))})
@pytest.mark.parametrize("elsewhere", ["meta of training", "batches", "outer loss"])
def test_what_is_on_another_device_than_the_parameters_is_refused(estimator, elsewhere, generator):
    problem = mlp(generator)
    training = problem.training(SGD())
    meta, carry = training.init_meta(problem.params, lr=0.1), training.init(problem.params)
    batches, end = problem.batches, outer_loss(problem)
    if elsewhere == "meta of training":
        meta, words = like(meta, META), ["hyper.lr of meta", "meta", "cpu", "metafop.tree.map"]
    elif elsewhere == "batches":
        batches, words = like(batches, META), ["The batch", "(6, 3)", "meta", "cpu", ".to('cpu')"]
    else:
        end, words = outer_loss(moved_to(problem, META)), ["outer loss", "two devices", ".to(device)"]
    assert_clear(lambda: estimator(training, end, meta, carry, batches), words)


@NEEDS_CUDA
@every("estimator", ESTIMATORS | {"adjoint, compiled": Adjoint(compile=True)})
def test_a_gpu_gives_the_estimate_of_the_cpu(estimator, generator):
    problem = convnet(generator)
    training = problem.training(Momentum(), Dense())
    meta = training.init_meta(problem.params, lr=0.1, momentum=0.9)
    given = (meta, training.init(problem.params, problem.buffers), problem.batches)
    estimates = []
    for device in ("cpu", "cuda"):
        meta, carry, batches = tree.map(lambda x, device=device: x.to(device), given)

        def end(carry, batch=batches[-1]):
            return problem.loss(carry.params, carry.buffers, batch)[0]

        estimates.append(estimator(training, end, meta, carry, batches))
    on_cpu, on_gpu = estimates
    assert {x.type for x in devices(on_gpu[:-1])} == {"cuda"}
    assert_near(tree.map(lambda x: x.cpu(), on_gpu.grads), on_cpu.grads, rtol=1e-6)
