"""Evolution: unbiased where a window is not, as noisy as it says, moderate where derivatives explode."""

import copy
import io
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import pytest
import torch
from problems import (
    OPTIMIZERS,
    Problem,
    assert_near,
    assert_same_bits,
    batch_loss,
    convnet,
    every,
    filled,
    mlp,
    moved,
)
from torch import nn
from torch.func import grad_and_value
from torch.nn.attention import SDPBackend, sdpa_kernel

from metafop import (
    SGD,
    Adam,
    Dense,
    Meta,
    Momentum,
    Online,
    Rescaled,
    Scalar,
    Scheduled,
    Training,
    functional,
    tree,
)
from metafop.hypergradients import autograd
from metafop.hypergradients.evolution import Evolution, evolution

LR = ("lr",)
CURVATURE = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)


def noisy_quadratic(lr, generator):
    """Return a training on ½ Σ h (θ - noise)², its meta and carry, and 24 batches of noise."""
    loss = functional.plain(lambda params, noise: 0.5 * (CURVATURE * (params["w"] - noise).square()).sum())
    training, params = Training(loss, SGD()), {"w": torch.full((3,), 3.0)}
    batches = list(0.5 * torch.randn(24, 3, generator=generator))
    return training, training.init_meta(params, lr=lr), training.init(params), batches


def quadratic_loss(carry):
    return 0.5 * (CURVATURE * carry.params["w"].square()).sum()


def windows(estimator, training, outer_loss, meta, carry, batches, length):
    """Return the estimates of windows of some length, each going on from the last."""
    estimates = []
    for start in range(0, len(batches), length):
        estimates.append(estimator(training, outer_loss, meta, carry, batches[start : start + length]))
        carry = estimates[-1].carry
    return estimates


def test_over_windows_it_is_unbiased_where_truncation_is_biased(generator):
    training, meta, carry, batches = noisy_quadratic(0.5, generator)
    whole = torch.stack(
        [
            autograd(training, quadratic_loss, meta, carry, batches[:end]).grads.hyper.lr
            for end in range(4, 25, 4)
        ]
    )
    window = (training, quadratic_loss, meta)
    truncated = torch.stack([e.grads.hyper.lr for e in windows(autograd, *window, carry, batches, 4)])
    estimator = Evolution(LR, pairs=6000)
    particles = estimator.init(carry, generator)
    estimates = windows(estimator, *window, particles, batches, 4)
    estimated = torch.stack([e.grads.hyper.lr for e in estimates])
    errors = torch.stack([e.info["standard_error"].hyper.lr for e in estimates])
    assert ((estimated - whole).abs() < 4 * errors).all()
    assert (estimated.sum() - whole.sum()).abs() < 4 * errors.sum()
    assert (truncated.sum() - whole.sum()).abs() > 10 * errors.sum()


def prepared(problem, setting, family, generator):
    """Return a training, the loss of the last batch, a meta that has learned something, and a carry."""
    training = problem.training(setting.optimizer, family)
    meta = training.init_meta(problem.params, generator, **setting.hyper()._asdict())
    carry = training.init(problem.params, problem.buffers)

    def outer_loss(carry):
        return problem.loss(carry.params, carry.buffers, problem.batches[-1])[0]

    return training, outer_loss, Meta(meta.hyper, moved(meta.precond, generator, 0.1)), carry


def deviations(estimate, exact):
    """Return how many standard errors each number is off, of those that are perturbed."""
    found, errors, exact = (tree.named(x) for x in (estimate.grads, estimate.info["standard_error"], exact))
    off = {k: (found[k] - exact[k]) / errors[k] for k in found}
    return torch.cat([x[errors[k] > 0] for k, x in off.items()])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


class Attention(nn.Module):
    """Attention with one head, by the kernel that torch fuses."""

    def forward(self, x):
        q, k, v = x[:, None].chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)[:, 0].mean(1)


def sequences(layer, generator):
    """Return the problem of telling sequences of three apart with a layer."""
    model = filled(nn.Sequential(layer), generator)
    batches = [(torch.randn(4, 3, 3, generator=generator), torch.tensor([0, 1, 0, 1])) for _ in range(5)]
    return Problem(model, *functional.from_module(model, batch_loss), batches)


def attention(generator):
    return sequences(nn.Sequential(nn.Linear(3, 6), Attention()), generator)


CASES = {
    "mlp, heavy ball": (mlp, "heavy ball, decayed", Dense()),
    "mlp, adam": (mlp, "adam, short", Scalar()),
    "attention, nesterov": (attention, "nesterov", Scalar()),
    "convnet, sgd": (convnet, "sgd", Scalar()),
    "convnet, adam": (convnet, "adam, decayed", None),
}


@every("make, setting, family", CASES)
def test_over_two_windows_networks_have_the_derivative_of_both(make, setting, family, generator):
    problem = make(generator)
    training, outer_loss, meta, carry = prepared(problem, OPTIMIZERS[setting], family, generator)
    estimator = Evolution(pairs=1000, sigma=1e-3)
    window = (training, outer_loss, meta, estimator.init(carry, generator), problem.batches[:4])
    _, second = windows(estimator, *window, 2)
    with sdpa_kernel(SDPBackend.MATH):
        exact = autograd(training, outer_loss, meta, carry, problem.batches[:4])
    off = deviations(second, exact.grads)
    assert off.abs().max() < 4
    assert 0.1 < off.square().mean().sqrt() < 2.5  # few numbers, which depend on each other
    assert_near(second.value, exact.value, rtol=1e-3)


def test_online_learning_has_a_derivative(generator):
    problem = mlp(generator)
    training, outer_loss, meta, carry = prepared(problem, OPTIMIZERS["heavy ball"], Scalar(), generator)
    online = Online(training, Adam(), learn=("precond", "lr"))
    outer_meta, state = online.init_meta(meta, lr=0.05), online.init(meta, carry)
    estimator = Evolution(LR, pairs=500, sigma=1e-3)
    estimate = estimator(
        online, outer_loss, outer_meta, estimator.init(state, generator), problem.batches[:4]
    )
    exact = autograd(online, outer_loss, outer_meta, state, problem.batches[:4]).grads
    assert deviations(estimate, exact).abs().max() < 4


def test_estimates_scatter_as_the_standard_error_says(generator):
    training, meta, carry, batches = noisy_quadratic(0.5, generator)
    estimator = Evolution(LR, pairs=16)
    runs = [
        windows(estimator, training, quadratic_loss, meta, estimator.init(carry, generator), batches[:6], 3)[
            -1
        ]
        for _ in range(200)
    ]
    spread = torch.stack([run.grads.hyper.lr for run in runs]).std()
    said = torch.stack([run.info["standard_error"].hyper.lr for run in runs]).square().mean().sqrt()
    assert_near(said, spread, rtol=0.15)  # the spread of 200 is itself uncertain by 5 %


def test_of_a_linear_loss_pairs_leave_no_error_but_that_of_their_variance(generator):
    loss = functional.plain(lambda params, batch: (params["w"] * batch).sum())
    training, params, slope = (
        Training(loss, SGD(), {"w": Scalar()}),
        {"w": torch.ones(2)},
        torch.tensor([1.0, 2.0]),
    )
    meta, carry = training.init_meta(params, lr=0.1), training.init(params)
    estimator = Evolution(learn=("precond",), pairs=8)
    window = (training, lambda carry: 1e6 + carry.params["w"].sum(), meta, estimator.init(carry, generator))
    estimate = estimator(*window, [slope])
    variance = estimate.carry.perturbations["precond.w"].square().mean() / estimator.sigma**2
    assert_near(estimate.grads.precond["w"], -0.1 * slope.sum() * variance, rtol=1e-6)
    assert estimate.info["standard_error"].precond["w"] < 0.3


def test_the_same_call_gives_the_same_bits_and_the_next_window_other_noise(generator):
    problem = convnet(generator)
    training, outer_loss, meta, carry = prepared(problem, OPTIMIZERS["adam, short"], Scalar(), generator)
    particles = evolution.init(carry, generator)
    before = copy.deepcopy((meta, particles))
    first, second = (evolution(training, outer_loss, meta, particles, problem.batches[:2]) for _ in range(2))
    assert_same_bits(first[:3], second[:3])
    assert_same_bits((meta, particles), before)
    third = evolution(training, outer_loss, meta, first.carry, problem.batches[:2])
    old = first.carry.perturbations["hyper.lr"]
    assert not torch.isclose(third.carry.perturbations["hyper.lr"], 2 * old).any()


def test_particles_that_were_saved_go_on_as_if_they_had_not_been(generator):
    training, meta, carry, batches = noisy_quadratic(0.5, generator)
    window = (training, quadratic_loss, meta)
    particles = evolution(*window, evolution.init(carry, generator), batches[:3]).carry
    file = io.BytesIO()
    torch.save(particles, file)
    file.seek(0)
    loaded = torch.load(file)
    assert_same_bits(
        evolution(*window, loaded, batches[3:6])[:3], evolution(*window, particles, batches[3:6])[:3]
    )


class Kept(NamedTuple):
    velocity: Any
    lr: torch.Tensor
    momentum: torch.Tensor


@dataclass(frozen=True)
class Recording(Momentum):
    """Momentum that keeps what it was steered by."""

    def init(self, params) -> Any:
        return Kept(super().init(params), torch.zeros(()), torch.zeros(()))

    def update(self, hyper: Any, params, opt: Any, direction) -> Any:
        params, velocity = super().update(hyper, params, opt.velocity, direction)
        return params, Kept(velocity, hyper.lr, hyper.momentum)


def test_perturbations_stay_in_range_however_large(generator):
    training = Training(functional.plain(lambda params, batch: params["w"].sum()), Recording())
    params = {"w": torch.ones(1)}
    meta, carry = training.init_meta(params, lr=0.1, momentum=0.9), training.init(params)
    estimator = Evolution(sigma=30.0)
    estimate = estimator(
        training, lambda carry: carry.params["w"].sum(), meta, estimator.init(carry, generator), [()]
    )
    kept = estimate.carry.carries.opt
    assert (kept.lr > 0).all()
    assert ((kept.momentum > 0) & (kept.momentum < 1)).all()
    assert_near(kept.lr[:32] * kept.lr[32:], torch.full((32,), 0.1**2), rtol=1e-10)


def test_what_is_on_the_boundary_of_its_range_stays_exactly_there(generator):
    training = Training(functional.plain(lambda params, batch: params["w"].sum()), Recording())
    params = {"w": torch.ones(1)}
    meta, carry = training.init_meta(params, lr=0.1, momentum=0.0), training.init(params)
    estimator = Evolution(("lr", "momentum"), sigma=0.5)
    state = estimator.init(carry, generator)
    state = estimator(training, lambda carry: carry.params["w"].sum(), meta, state, [()]).carry
    assert (state.carries.opt.momentum == 0).all()
    assert (state.perturbations["hyper.momentum"] == 0).all()
    assert len(state.carries.opt.lr.unique()) == 64


def test_beside_an_entry_on_the_boundary_the_others_move(generator):
    """The gradient is 1: each step moves w by its entry of the schedule."""
    scheduled, params = Scheduled(SGD(), 3), {"w": torch.ones(1)}
    training = Training(functional.plain(lambda params, batch: params["w"].sum()), scheduled)
    hyper = scheduled.hyper(lr=[0.1, 0.0, 0.2])
    meta, estimator = training.init_meta(params, **hyper._asdict()), Evolution(LR, sigma=0.5)
    state, estimates = estimator.init(training.init(params), generator), []
    for _ in range(3):
        estimates.append(estimator(training, lambda carry: carry.params["w"].sum(), meta, state, [()]))
        state = estimates[-1].carry
    places = [torch.ones(64, 1), *(estimate.carry.carries.params["w"] for estimate in estimates)]
    first, second, third = (before - after for before, after in pairwise(places))
    assert (second == 0).all()
    for way, lr in ((first, 0.1), (third, 0.2)):
        assert len(way.unique()) == 64
        assert_near(way[:32] * way[32:], torch.full((32, 1), lr**2), rtol=1e-12)
    last, stays = estimates[-1], torch.tensor([False, True, False])
    assert torch.equal(last.carry.perturbations["hyper.lr"] == 0, stays.expand(32, 3))
    assert torch.equal(last.grads.hyper.lr == 0, stays)
    assert "boundary of its range: hyper.lr." in last.info["notes"][1]


def chaos(lr):
    """Return the training θ' = θ + lr sin θ, which is chaotic where lr is large."""
    training, params = (
        Training(functional.plain(lambda p, batch: p["w"].cos().sum()), SGD()),
        {"w": torch.ones(1)},
    )
    return (
        training,
        lambda carry: carry.params["w"].cos().sum(),
        training.init_meta(params, lr=lr),
        params,
    )


def test_where_derivatives_explode_it_stays_moderate(generator):
    training, outer_loss, meta, params = chaos(lr=10.0)
    exact = autograd(training, outer_loss, meta, training.init(params), 50 * [()])
    estimator = Evolution(LR, pairs=500, sigma=0.1)
    particles = estimator.init(training.init(params), generator)
    estimate = estimator(training, outer_loss, meta, particles, 50 * [()])
    assert exact.grads.hyper.lr.abs() > 1e10
    assert estimate.grads.hyper.lr.abs() < 1
    assert estimate.info["standard_error"].hyper.lr < 0.1


def test_what_has_no_coordinate_has_zeros_and_a_note(generator):
    problem = mlp(generator)
    training, outer_loss, meta, carry = prepared(
        problem, OPTIMIZERS["sgd"], Rescaled(Dense(), 0.5), generator
    )
    estimator = Evolution(learn=("hyper", "precond.0"))
    estimate = estimator(training, outer_loss, meta, estimator.init(carry, generator), problem.batches[:2])
    moving = {"hyper.lr", "precond.0.weight.inner", "precond.0.bias.inner"}
    for x in (estimate.grads, estimate.info["standard_error"]):
        assert {k for k, leaf in tree.named(x).items() if leaf.any()} == moving
    others, boundary, times = estimate.info["notes"]
    assert "not name: precond.2.weight.inner, precond.2.weight.time, precond.2.bias.inner" in others
    assert "boundary of its range: hyper.weight_decay." in boundary
    assert "times, which pass: precond.0.bias.time, precond.0.weight.time." in times


def growing(generator, sigma, steps):
    """Return an estimate where a particle overflows if its lr is above 2."""
    loss = functional.plain(lambda params, batch: 0.5 * params["w"].square().sum())
    training, params = Training(loss, SGD()), {"w": torch.ones(1, dtype=torch.float32)}
    meta, estimator = training.init_meta(params, lr=2.0), Evolution(LR, sigma=sigma)
    particles = estimator.init(training.init(params), generator)
    return estimator(training, lambda carry: carry.params["w"].square().sum(), meta, particles, steps * [()])


def test_pairs_that_overflow_are_left_out_and_counted(generator):
    estimate = growing(generator, sigma=1.0, steps=40)
    finite = estimate.carry.carries.params["w"].square().sum(1).isfinite()
    out = int((~(finite[:32] & finite[32:])).sum())
    assert 0 < out < 32
    assert all(x.isfinite() for x in (estimate.value, estimate.grads.hyper.lr))
    assert f"{out} are left out of the estimate. " in estimate.info["notes"][1]
    assert f"at step {estimate.info['overflow']} of 40" in estimate.info["notes"][1]


def test_if_no_pair_is_left_the_note_says_that_there_is_no_estimate(generator):
    estimate = growing(generator, sigma=30.0, steps=100)
    assert estimate.grads.hyper.lr.isnan()
    assert "32 are left out of the estimate, so that there is none" in estimate.info["notes"][1]


def test_where_torch_cannot_vmap_particles_train_one_after_another(generator):
    problem = sequences(Recurrent(), generator)
    training, outer_loss, meta, carry = prepared(problem, OPTIMIZERS["heavy ball"], None, generator)

    def differentiated(carry):  # which changes how torch computes it
        return grad_and_value(lambda params: outer_loss(carry._replace(params=params)))(carry.params)[1]

    estimator = Evolution(LR, pairs=3)
    particles = estimator.init(carry, generator)
    slow, fast = (
        estimator(training, f, meta, particles, problem.batches[:2]) for f in (outer_loss, differentiated)
    )
    assert_near(slow.grads, fast.grads, rtol=1e-10)
    assert_near(slow.carry.carries, fast.carry.carries, rtol=1e-12)
    assert "vmap failed: Batching rule not implemented for aten::lstm.input." in slow.info["notes"][1]
    assert len(fast.info["notes"]) == 1


def refused():
    """Return calls that are refused, the kind of error, and words of its sentence."""
    generator = torch.Generator().manual_seed(0)
    training, meta, carry, batches = noisy_quadratic(0.5, generator)
    window, two = (training, quadratic_loss, meta), Evolution(LR, pairs=2)
    particles = two.init(carry, generator)
    started = two(*window, particles, batches[:1]).carry
    return {
        "a plain carry": (
            lambda: evolution(*window, carry, batches),
            [TypeError, "EvolutionCarry", "got a Carry", "Pass evolution.init(carry, generator)."],
        ),
        "a seed": (
            lambda: evolution.init(carry, cast(Any, 0)),
            [TypeError, "torch.Generator", "got 0", "Pass"],
        ),
        "one pair": (lambda: Evolution(pairs=1), [ValueError, "two pairs", "pairs=1", "Pass"]),
        "no sigma": (lambda: Evolution(sigma=0.0), [ValueError, "sigma", "0.0", "Pass"]),
        "no names": (lambda: Evolution(learn=()), [ValueError, "Evolution", "learn=()", "Pass"]),
        "an unknown name": (
            lambda: Evolution(("rate",), pairs=2)(*window, particles, batches),
            [ValueError, "'rate'", "'lr'", "Name one"],
        ),
        "other pairs": (
            lambda: evolution(*window, particles, batches),
            [ValueError, "has 64 particles", "holds 4", "Start again"],
        ),
        "other names": (
            lambda: Evolution(pairs=2)(*window, started, batches),
            [ValueError, "perturbations of hyper.lr", "hyper.weight_decay", "Start again"],
        ),
        "nothing that moves": (
            lambda: Evolution(("weight_decay",), pairs=2)(*window, particles, batches),
            [ValueError, "nothing to perturb: hyper.weight_decay", "Name something"],
        ),
        "no batches": (lambda: two(*window, particles, []), [ValueError, "no batches", "Pass"]),
    }


@every("call, expected", refused())
def test_what_is_refused_is_named_with_a_remedy(call, expected):
    kind, *words = expected
    with pytest.raises(kind) as error:
        call()
    assert all(word in str(error.value) for word in words)


def test_an_outer_loss_in_steps_is_no_fault(generator):
    """Where it is flat for all particles the estimate is zero, and that is right."""
    training = Training(functional.plain(lambda params, x: (params["w"] - x).square().sum()), SGD())
    params = {"w": torch.zeros(2)}
    meta, evolution = training.init_meta(params, lr=0.1), Evolution(("lr",), pairs=2)
    start = evolution.init(training.init(params), generator)
    estimate = evolution(
        training, lambda c: (c.params["w"] > 5.0).double().mean(), meta, start, [torch.ones(2)]
    )
    assert estimate.value == estimate.grads.hyper.lr == 0


def test_what_torch_cannot_batch_is_trained_one_after_another(generator):
    training = Training(
        functional.plain(
            lambda params, x: (params["w"] - x).square().sum() * (1 + 0 * float(params["w"].sum()))
        ),
        SGD(),
    )
    params = {"w": torch.zeros(2)}
    meta, evolution = training.init_meta(params, lr=0.1), Evolution(("lr",), pairs=2)
    start = evolution.init(training.init(params), generator)
    estimate = evolution(training, lambda c: c.params["w"].sum(), meta, start, 2 * [torch.ones(2)])
    assert "one particle after another" in " ".join(estimate.info["notes"])
