"""Leaves of the loss and the start are learned from horizons: in their coordinates, if to be trusted."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from events import read, scalar
from leaves import FORMS, unrolled
from problems import OPTIMIZERS, assert_near, assert_same_bits, every, mlp

from metafop import SGD, Adam, Momentum, Scheduled, Tasks, Training, functional, tree
from metafop.diagnostics import GrowsSlowly, HalvesAgree, Metasmooth
from metafop.hypergradients import Evolution, Forward, Truncated, adjoint, autograd
from metafop.meta_training import meta_train
from metafop.optimizers import Free, Positive, Unit
from metafop.unrolled import Unrolled

HEAVY = OPTIMIZERS["heavy ball"]
START = ("hyper", "loss", "start")
ESTIMATORS = {
    "adjoint": adjoint,
    "autograd": autograd,
    "forward": Forward(START),
    "one window": Truncated(4),
}
# Each with its coordinate z and the value at z.
DOMAINS = {
    "free": (Free(), lambda x: x, lambda z: z),
    "positive": (Positive(), torch.log, torch.exp),
    "unit": (Unit(), torch.logit, torch.sigmoid),
}


def in_domains(domains, generator):
    """Return an unroll whose leaves "weights" and others have these domains."""
    problem = unrolled(mlp, FORMS["nested"], HEAVY, generator)
    return replace(problem, training=replace(problem.training, loss_domains=domains))


@every("domain, coordinate, value", DOMAINS)
@every("estimator", ESTIMATORS)
def test_leaves_and_the_start_move_by_the_derivative_in_their_coordinates(
    estimator, domain, coordinate, value, generator
):
    problem = in_domains({"weights": domain}, generator)
    training, outer_loss, meta, carry, batches = problem.given
    learner, start = Unrolled(training, SGD(), ("loss", "lr", "start"), estimator), carry.params
    outer_meta, state = learner.init_meta(meta, start, lr=0.1), learner.init(meta, start)
    moved, info = learner.step(outer_meta, state, outer_loss, carry, batches)
    expected = problem.differentiated()

    def along(x, h, coordinate=coordinate, value=value):
        z = coordinate(x).requires_grad_()
        return value(z - 0.1 * torch.autograd.grad(value(z), z, h)[0]).detach()

    assert info["moved"]
    assert_near(moved.start, along_all(start, expected.start.params), rtol=1e-10)
    leaves, h = meta.loss, expected.grads.loss
    assert_near(moved.meta.loss["weights"], along(leaves["weights"], h["weights"]), rtol=1e-10)
    assert_near(moved.meta.loss["l2"], along_all(leaves["l2"], h["l2"]), rtol=1e-10)
    lr = meta.hyper.lr * torch.exp(-0.1 * meta.hyper.lr * expected.grads.hyper.lr)
    assert_near(moved.meta.hyper.lr, lr, rtol=1e-10)
    assert_same_bits(moved.meta.hyper.momentum, meta.hyper.momentum)


def along_all(x, h):
    return tree.map(lambda x, h: x - 0.1 * h, x, h)


@every("part", {"all": "start", "a layer": "start.2", "one": "start.2.bias"})
def test_a_part_of_the_start_moves_and_all_of_it_is_where_training_starts(part, generator):
    training, outer_loss, meta, carry, batches = unrolled(mlp, FORMS["a penalty"], HEAVY, generator).given
    start = tree.map(lambda p: p + 0.1, carry.params)
    learner = Unrolled(training, SGD(), (part,))
    outer_meta, state = learner.init_meta(meta, start, lr=0.1), learner.init(meta, start)
    moved, info = learner.step(outer_meta, state, outer_loss, carry, batches)
    estimate = adjoint(training, outer_loss, meta, carry._replace(params=start), batches)
    assert_same_bits(info["value"], estimate.value)
    assert_same_bits(moved.meta, meta)
    for k, p in start.items():
        named = f"start.{k}".startswith(part)
        expected = p - 0.1 * estimate.start.params[k] if named else p
        assert_near(moved.start[k], expected, rtol=1e-12)


def test_the_start_of_many_tasks_moves_by_the_sum_of_their_derivatives(generator):
    training, outer_loss, meta, carry, batches = unrolled(mlp, FORMS["a penalty"], HEAVY, generator).given
    tasks, start = Tasks(training, 2), carry.params
    learner = Unrolled(tasks, SGD(), ("start",))
    outer_meta, state = learner.init_meta(meta, start, lr=0.1), learner.init(meta, start)
    pairs = [tree.stack(pair) for pair in zip(batches, reversed(batches), strict=True)]

    def outer(carry):
        first, second = (tree.map(lambda x, k=k: x[k], carry) for k in range(2))
        return outer_loss(first) + outer_loss(second)

    moved, _ = learner.step(outer_meta, state, outer, tasks.init(start), pairs)
    one, other = (
        adjoint(training, outer_loss, meta, training.init(start), each).start.params
        for each in (batches, batches[::-1])
    )
    assert_near(moved.start, along_all(start, tree.add(one, other)), rtol=1e-10)


@every("domains", {k: {"*": domain} for k, (domain, *_) in DOMAINS.items()})
def test_particles_estimate_leaves_within_their_standard_error(domains, generator):
    problem = unrolled(mlp, FORMS["a penalty"], HEAVY, generator)
    training, outer_loss, meta, carry, batches = problem.given
    training = replace(training, loss_domains=domains)
    strategy = Evolution(("loss", "lr"), pairs=200, sigma=1e-3)
    estimate = strategy(training, outer_loss, meta, strategy.init(carry, generator), batches)
    expected, error = problem.differentiated().grads, estimate.info["standard_error"]
    for found, true, e in (
        (estimate.grads.loss, expected.loss, error.loss),
        (estimate.grads.hyper.lr, expected.hyper.lr, error.hyper.lr),
    ):
        assert abs(found - true) < 4 * e + 1e-4 * abs(true)


TESTS = {
    "metasmooth": lambda least: Metasmooth(1.0 if least else -1.0, h=3.0),
    "halves": lambda least: HalvesAgree(1.0 if least else -1.0),
    "growth": lambda least: GrowsSlowly(1e-3 if least else 1e3),
}


@every("test", TESTS)
def test_nothing_is_learned_of_leaves_or_the_start_if_a_test_fails(test, generator):
    training, outer_loss, meta, carry, batches = unrolled(mlp, FORMS["nested"], HEAVY, generator).given
    start, found = carry.params, []
    for trust in ((), (test(False),), (test(True),)):
        learner = Unrolled(training, Adam(), ("loss", "start"), trust=trust)
        outer_meta, state = learner.init_meta(meta, start, lr=0.1), learner.init(meta, start)
        found.append(learner.step(outer_meta, state, outer_loss, carry, batches))
    (free, _), (passed, said), (failed, why) = found
    assert_same_bits((passed.meta, passed.start, passed.meta_opt), (free.meta, free.start, free.meta_opt))
    assert said["moved"]
    assert said["notes"] == ()
    assert_same_bits((failed.meta, failed.start), (meta, start))
    assert not why["moved"]
    (note,) = why["notes"]
    assert "Nothing is learned from this estimate" in note
    assert str(test(True)) in note
    (name,) = [k for k in why if k.startswith("trust/")]
    assert_same_bits(why[name], said[name])


def test_what_requires_a_gradient_leaves_no_record_in_the_state(generator):
    training, outer_loss, meta, carry, batches = unrolled(mlp, FORMS["nested"], HEAVY, generator).given
    recorded, start = tree.map(lambda x: x.clone().requires_grad_(), (meta, carry.params))
    learner, found = Unrolled(training, Adam(), ("loss", "lr", "start")), []
    for given, where in ((recorded, start), (meta, carry.params)):
        outer_meta, state = learner.init_meta(given, where, lr=0.1), learner.init(given, where)
        for _ in range(2):
            state, _ = learner.step(outer_meta, state, outer_loss, carry, batches)
        found.append(state)
    assert_same_bits(*found)
    assert not any(x.requires_grad for x in tree.leaves(found[0]))


def test_tests_of_trust_are_refused_where_the_start_alone_is_learned(generator):
    training = unrolled(mlp, FORMS["a penalty"], HEAVY, generator).training
    with pytest.raises(ValueError, match=r"look at leaves of meta\. Learn one, or pass none\."):
        Unrolled(training, Adam(), ("start",), trust=(HalvesAgree(),))


class Interrupted(Exception):
    pass


def weighted(params, batch, leaves):
    x, y = batch
    each = leaves["weights"].sigmoid() * (x @ params["w"] - y).square()
    return each.mean() + leaves["l2"] * params["w"].square().sum()


@dataclass(frozen=True)
class Regression:
    """Four batches of eight examples, of which the first three have wrong targets."""

    training: Training
    fails: tuple[int, ...] = field(default=(), repr=False)

    def start(self, episode: int) -> Any:
        return self.training.init({"w": torch.zeros(3)})

    def batches(self, episode: int, window: int) -> Any:
        if episode in self.fails:
            raise Interrupted
        rng = torch.Generator().manual_seed(episode)
        x = torch.randn(4, 8, 3, generator=rng)
        y = x.sum(-1) + 3 * (torch.arange(8) < 3)
        return list(zip(x, y, strict=True))

    def outer_loss(self, episode: int, window: int) -> Any:
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1000 + episode))
        return lambda carry: (x @ carry.params["w"] - x.sum(-1)).square().mean()


def run(folder=None, steps=6, fails=(), leaves=0.0, start=0.0, **settings):
    training = Training(
        functional.plain(weighted),
        Scheduled(Momentum(), 4, ("lr", "loss.l2")),
        loss_domains={"l2": Positive()},
    )
    given = {"weights": torch.full((8,), leaves), "l2": 0.01}
    meta = training.init_meta({"w": torch.zeros(3)}, loss=given, lr=0.1, momentum=0.5)
    learner = Unrolled(training, Adam(), ("loss", "lr", "start"))
    where = {"w": torch.full((3,), start)}
    outer_meta = learner.init_meta(meta, where, lr=0.1)
    task = Regression(training, fails)
    return meta_train(
        learner, outer_meta, meta, task, steps, start=where, folder=folder, save_every=2, **settings
    )


@every("stops", {"once": [3], "twice": [1, 4]})
def test_an_interrupted_run_ends_as_one_that_was_not_bit_for_bit(stops, tmp_path):
    whole = run(tmp_path / "whole")
    for stop in stops:
        with pytest.raises(Interrupted):
            run(tmp_path / "parts", fails=(stop,))
    parts = run(tmp_path / "parts")
    assert_same_bits(parts.state, whole.state)
    assert (parts.history, parts.notes) == (whole.history, whole.notes)
    wrong, right = whole.state.meta.loss["weights"].split([3, 5])
    assert wrong.mean() < right.mean()
    assert dict(whole.state.start)["w"].min() > 0.1


@every("other", {"leaves": {"leaves": 0.1}, "start": {"start": 0.1}})
def test_a_folder_of_other_leaves_or_another_start_is_refused(other, tmp_path):
    run(tmp_path, steps=2)
    with pytest.raises(ValueError, match="differs in"):
        run(tmp_path, **other)


def test_what_is_learned_has_names_in_the_history_and_in_tensorboard(tmp_path):
    history = run(tmp_path, steps=2).history
    names = {"loss.weights.norm", "loss.l2.norm", "hyper.lr.mean", "start.w.norm"}
    assert names <= history[0].keys()
    assert history[1]["start.w.norm"] > history[0]["start.w.norm"] == 0
    (path,) = tmp_path.glob("events*")
    assert {"curve/loss.weights", "curve/loss.l2", "curve/start.w"} <= set(read(path).Tags()["images"])
    assert scalar(read(path), "loss.l2.norm")[0] == (0, pytest.approx(0.01 * math.sqrt(4)))


def test_windows_of_a_learned_start_are_refused(tmp_path):
    with pytest.raises(ValueError, match="learns the start of episodes and got windows=2"):
        run(windows=2)
