"""Many tasks with one meta are a loop over the tasks: their steps, their losses, and every derivative."""

import pytest
import torch
from leaves import FORMS, SCHEDULED, Form, unrolled
from problems import OPTIMIZERS, Setting, assert_near, attention, convnet, every, gru, mlp, moved
from torch.func import vmap
from torch.nn.functional import cross_entropy

from metafop import Adam, LowRank, Momentum, Online, Scheduled, Tasks, tree
from metafop.hypergradients import Adjoint, Forward, adjoint, autograd
from metafop.types import Given, Last

COUNT = 3
THREE_WEIGHTS = Form(
    lambda problem, rng: torch.rand(COUNT, generator=rng),
    lambda predict, params, batch, leaves: (
        leaves[batch[2] % COUNT] * cross_entropy(predict(batch[0]), batch[1], reduction="none")
    ).mean(),
)
HEAVY = OPTIMIZERS["heavy ball, decayed"]
BY_STEP = Setting(Scheduled(Momentum(), 3, ("lr", "loss.l2")), {"lr": [0.1, 0.05, 0.02]}, HEAVY.twin)
PROBLEMS = {
    "heavy ball": (mlp, FORMS["nested"], HEAVY, LowRank(2), 0.0),
    "adam": (mlp, FORMS["inputs"], OPTIMIZERS["adam, short"], None, 0.0),
    "batch norm": (convnet, FORMS["weights"], HEAVY, None, 0.0),
    "layer norm": (attention, FORMS["a penalty"], OPTIMIZERS["sgd"], None, 0.0),
    "dropout": (mlp, FORMS["labels"], HEAVY, None, 0.3),
    "by step": (mlp, SCHEDULED, BY_STEP, None, 0.0),
}
# Its loss has a gradient inside vmap, but no value: torch has no rule for a GRU alone.
WITH_GRU = PROBLEMS | {"gru": (gru, FORMS["a penalty"], HEAVY, None, 0.0)}
ESTIMATORS = {
    "adjoint": adjoint,
    "over forward": Adjoint(over="forward"),
    "autograd": autograd,
    "forward": Forward(("hyper", "loss", "start")),
}


def tasks_and_each(problem):
    """Return what an estimator takes, of three tasks at once, and of each of them."""
    meta, model = problem.meta, problem.problem
    carries = [problem.carry, *(each for each in _later(problem, COUNT - 1))]
    batches = [problem.batches[k:] + problem.batches[:k] for k in range(COUNT)]

    def outer(params, batch):
        return model.loss(params, model.buffers, batch)[0]

    def each(k):
        return (
            problem.training,
            lambda carry: outer(carry.params, model.batches[k]),
            meta,
            carries[k],
            batches[k],
        )

    examples = tree.stack(model.batches[:COUNT])
    together = (
        Tasks(problem.training, COUNT),
        lambda carry: vmap(outer)(carry.params, examples).mean(),
        meta,
        tree.stack(carries),
        [tree.stack(step) for step in zip(*batches, strict=True)],
    )
    return together, [each(k) for k in range(COUNT)]


def _later(problem, count):
    """Yield other carries: those after a step, and after another."""
    carry = problem.carry
    for batch in problem.batches[:count]:
        carry, _ = problem.training.step(problem.meta, carry, batch)
        yield carry


def mean(trees):
    return tree.map(lambda *xs: torch.stack(xs).mean(0), *trees)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's: it has no rule for attention
@every("make, form, setting, family, dropout", WITH_GRU)
def test_a_step_is_one_of_each(make, form, setting, family, dropout, generator):
    problem = unrolled(make, form, setting, generator, family, dropout)
    (tasks, _, meta, carry, batches), each = tasks_and_each(problem)
    alone = [given[3] for given in each]
    for t, batch in enumerate(batches):
        carry, info = tasks.step(meta, carry, batch)
        steps = [problem.training.step(meta, alone[k], given[4][t]) for k, given in enumerate(each)]
        alone = [after for after, _ in steps]
        assert_near(carry, tree.stack(alone), rtol=1e-12, size=1.0)
        assert_near(info, mean([one for _, one in steps]), rtol=1e-12)


@every("make, form, setting, family, dropout", PROBLEMS)
@every("estimator", ESTIMATORS)
def test_an_estimate_is_the_mean_of_those_of_each(estimator, make, form, setting, family, dropout, generator):
    problem = unrolled(make, form, setting, generator, family, dropout)
    together, each = tasks_and_each(problem)
    estimate, alone = estimator(*together), [estimator(*given) for given in each]
    expected = mean([one.grads for one in alone])
    assert_near(estimate.value, mean([one.value for one in alone]), rtol=1e-12)
    assert_near(estimate.carry, tree.stack([one.carry for one in alone]), rtol=1e-11, size=1.0)
    assert_near(estimate.grads, expected, rtol=1e-10, size=1e-3 * largest(expected))
    starts = tree.stack([one.start.params for one in alone])
    assert_near(estimate.start.params, tree.scale(starts, 1 / COUNT), rtol=1e-10, size=1e-3 * largest(starts))
    assert estimate.info["notes"] == alone[0].info["notes"]


def largest(x):
    return max(float(leaf.abs().max()) for leaf in tree.leaves(x))


def test_compiled(generator):
    problem = unrolled(mlp, FORMS["weights"], HEAVY, generator)
    together, _ = tasks_and_each(problem)
    estimate, expected = Adjoint(compile=True)(*together), adjoint(*together)
    assert_near(estimate[:3], expected[:3], rtol=1e-10, size=1e-3 * largest(expected.grads))


@every("setting", {k: OPTIMIZERS[k] for k in ("sgd, decayed", "nesterov, decayed", "adam, short")})
@every("with_credit", {"own gradient": False, "credit": True})
def test_a_pullback_is_the_sum_over_tasks(with_credit, setting, generator):
    """There are as many weights as tasks: they are not taken for one each."""
    problem = unrolled(mlp, THREE_WEIGHTS, setting, generator, LowRank(2))
    (tasks, _, meta, carry, batches), _ = tasks_and_each(problem)
    seen = tasks.evaluate(meta, carry, batches[0])
    credit, _ = tasks.credited(meta, tasks.init_memory(carry), seen.grads) if with_credit else ((), ())
    last, cotangent = Last(carry, seen, credit, Given(meta.loss, batches[0])), moved(carry.params, generator)

    def of_one(k):
        own, own_credit, own_cotangent, batch = tree.map(
            lambda x: x[k], (carry, credit, cotangent, batches[0])
        )
        own_seen = problem.training.evaluate(meta, own, batch)
        given = Given(meta.loss, batch)
        return problem.training.pullback(meta, Last(own, own_seen, own_credit, given), own_cotangent)

    expected = tree.scale(mean([of_one(k) for k in range(COUNT)]), COUNT)
    assert_near(tasks.pullback(meta, last, cotangent), expected, rtol=1e-11)


def test_a_learner_learns_from_all_tasks(generator):
    problem = unrolled(mlp, THREE_WEIGHTS, HEAVY, generator)
    (tasks, _, meta, carry, batches), _ = tasks_and_each(problem)
    online = Online(tasks, Adam(), ("loss", "lr"))
    outer_meta, state = online.init_meta(meta, lr=0.01), online.init(meta, carry, batches[0])
    for batch in batches:
        state, _ = online.step(outer_meta, state, batch)
    assert (state.meta.loss - meta.loss).abs().min() > 1e-3
