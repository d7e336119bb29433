"""What is not finite: a zero-gradient step is taken, meta stays, info says so, training goes on."""

import pytest
import torch
from himmelblau import descent, himmelblau, states
from problems import OPTIMIZERS, assert_near, assert_same_bits, convnet, every, mlp

from metafop import SGD, Adam, LowRank, Momentum, Online, Scalar, Training, functional, tree


def test_a_gradient_that_is_not_finite_coasts_leaves_meta_and_buffers_and_says_so(generator):
    problem = convnet(generator)
    training = problem.training(Momentum(), LowRank(2))
    meta = training.init_meta(problem.params, generator, lr=0.05)
    online = Online(training, Adam(), ("precond", "lr"))
    outer_meta = online.init_meta(meta, lr=0.01)
    state = states(
        online, Adam().hyper(lr=0.01), meta, training.init(problem.params, problem.buffers), problem.batches
    )[-1]
    inputs, labels = problem.batches[0]
    broken, info = online.step(outer_meta, state, (inputs * torch.nan, labels))
    assert not info["finite"]
    assert not info["moved"]
    assert info["value"].isnan()
    count = "1.num_batches_tracked"  # an integer, which goes on
    assert broken.buffers[count] == state.buffers[count] + 1
    buffers = broken.buffers | {count: state.buffers[count]}
    assert_same_bits((broken.meta, broken.meta_opt, buffers), (state.meta, state.meta_opt, state.buffers))
    velocity = tree.scale(state.carry.opt, 0.9)
    assert_near(broken.carry.opt, velocity, 1e-14)
    healed, info = online.step(outer_meta, broken, problem.batches[0])
    assert info["finite"]
    assert not info["moved"]  # there is nothing to learn from a zero-gradient step
    assert_same_bits(healed.meta_opt, state.meta_opt)
    healthy, info = online.step(outer_meta, healed, problem.batches[1])
    assert info["moved"]
    assert tree.all_finite(healthy)


def test_buffers_that_are_not_finite_count_as_such():
    def loss(params, buffers, batch):
        return params["w"].square().sum(), {"mean": 0.9 * buffers["mean"] + batch}

    training, params = Training(loss, SGD(), {"w": Scalar()}), {"w": torch.ones(3)}
    meta = training.init_meta(params, lr=0.1)
    online = Online(training, SGD())
    outer_meta = online.init_meta(meta, lr=0.1)
    state = online.init(meta, training.init(params, {"mean": torch.zeros(())}))
    for batch, finite in ((1.0, True), (torch.nan, False), (1.0, True)):
        state, info = online.step(outer_meta, state, batch)
        assert info["finite"] == finite
    torch.testing.assert_close(state.buffers["mean"].item(), 1.9)


def test_in_a_tower_no_storey_learns_from_a_gradient_that_is_not_finite(generator):
    problem = mlp(generator)
    training = problem.training(SGD(), Scalar())
    lower = Online(training, Adam())
    upper = Online(lower, Adam(), ("lr",))
    meta = training.init_meta(problem.params, lr=0.1)
    outer_meta = lower.init_meta(meta, lr=0.01)
    above = upper.init_meta(outer_meta, lr=0.01)
    state = states(
        upper,
        Adam().hyper(lr=0.01),
        outer_meta,
        lower.init(meta, training.init(problem.params)),
        problem.batches,
    )[-1]
    inputs, labels = problem.batches[0]
    broken, info = upper.step(above, state, (inputs * torch.inf, labels))
    assert not info["finite"]
    assert not info["below.finite"]
    assert_same_bits((broken.meta, broken.carry.meta), (state.meta, state.carry.meta))


def test_a_hypergradient_that_is_not_finite_leaves_meta_while_training_goes_on():
    def overflowing(training, meta, last, cotangent):
        return tree.scale(training.pullback(meta, last, cotangent), torch.inf)

    training, meta, carry = descent()
    online = Online(training, Adam(), guards=(), hypergradient=overflowing)
    before = states(online, Adam().hyper(lr=0.1), meta, carry, [None] * 2)[-1]
    state, info = online.step(online.init_meta(meta, lr=0.1), before, None)
    assert info["finite"]
    assert not info["moved"]
    assert_same_bits(state.meta, meta)
    assert himmelblau(state.params, None) < himmelblau(before.params, None)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)], ids=str
)
@every("setting", OPTIMIZERS)
def test_half_and_mixed_precision_learn_and_keep_their_precision(setting, dtypes):
    loss = functional.plain(
        lambda params, batch: (params["a"].double() @ batch * params["b"]).square().mean()
    )
    params = {"a": torch.ones(4, 3, dtype=dtypes[0]), "b": torch.ones((), dtype=dtypes[1])}
    training = Training(loss, setting.optimizer, {"a": LowRank(2), "b": Scalar()})
    meta = training.init_meta(params, torch.Generator().manual_seed(0), **setting.hyper()._asdict())
    online = Online(training, Adam(), ("precond", "lr"))
    last = states(online, Adam().hyper(lr=0.01), meta, training.init(params), [torch.ones(3)] * 5)[-1]
    assert [last.params[k].dtype for k in ("a", "b")] == list(dtypes)
    assert tree.all_finite(last)
    assert last.meta.hyper.lr != meta.hyper.lr


def test_a_meta_step_that_overflows_is_not_taken(generator):
    problem = mlp(generator)
    training = problem.training(SGD())
    meta = training.init_meta(problem.params, lr=0.1)
    online = Online(training, SGD(), ("lr",), guards=())
    for state in states(online, SGD().hyper(lr=1e300), meta, training.init(problem.params), problem.batches):
        assert tree.all_finite((state.params, state.meta))


@every("optimizer", {"sgd": SGD(), "momentum": Momentum(), "adam": Adam()})
def test_a_step_that_leads_out_of_the_finite_is_not_taken_and_info_says_so(optimizer):
    training = Training(functional.plain(lambda params, x: (params["w"] * x).square().sum()), optimizer)
    params, x = {"w": torch.ones(2)}, torch.tensor(1e5)
    meta = training.init_meta(params, lr=1e308)
    online = Online(training, Adam(), ("lr",))
    outer_meta, state = online.init_meta(meta, lr=0.1), online.init(meta, training.init(params))
    taken = []
    for _ in range(4):
        before = state
        state, info = online.step(outer_meta, state, x)
        assert tree.all_finite((state.params, state.carry.opt, state.meta))
        assert info["finite"] == (not torch.equal(state.params["w"], before.params["w"]))
        taken.append(bool(info["finite"]))
    assert not all(taken)


@every("optimizer", {"momentum": Momentum(), "adam": Adam()})
def test_credit_does_not_count_a_step_that_was_not_taken(optimizer, generator):
    problem = mlp(generator)
    training = problem.training(optimizer, LowRank(2))
    meta = training.init_meta(problem.params, generator, lr=0.05)
    online = Online(training, Adam())
    state = states(online, Adam().hyper(lr=0.01), meta, training.init(problem.params), problem.batches)[-1]
    outer_meta, (inputs, labels) = online.init_meta(meta, lr=0.01), problem.batches[0]
    far = state.meta._replace(hyper=state.meta.hyper._replace(lr=torch.tensor(torch.inf)))
    refused, info = online.step(outer_meta, state._replace(meta=far), (inputs, labels))
    assert not info["finite"]
    went_on, info = online.step(outer_meta, refused._replace(meta=state.meta), (inputs, labels))
    assert info["finite"]
    assert not info["moved"]
    expected, _ = online.step(outer_meta, state, (inputs, labels))
    assert_same_bits((went_on.memory, went_on.last_seen), (expected.memory, expected.last_seen))
    assert_same_bits(went_on.last_carry, state.carry)


def test_what_was_learned_at_a_step_that_was_not_taken_is_not_kept():
    """Only then can training go on: the next step is taken with the meta before."""
    training = Training(functional.plain(lambda params, x: (x * params["w"]).square().sum()), SGD())
    params = {"w": torch.ones(2)}
    meta = training.init_meta(params, lr=1e-3)
    online = Online(training, SGD(), ("lr",), guards=())
    outer_meta, state = online.init_meta(meta, lr=8.75e-6), online.init(meta, training.init(params))
    state, _ = online.step(outer_meta, state, torch.ones(2))
    after, info = online.step(outer_meta, state, torch.tensor(1e5))  # lr would be 1e301
    assert not info["finite"]
    assert not info["moved"]
    assert_same_bits((after.meta, after.params), (state.meta, state.params))
    healed, info = online.step(outer_meta, after, torch.ones(2))
    assert info["finite"]
    assert not torch.equal(healed.params["w"], after.params["w"])


@every("single", {"float32": torch.float32, "float64": torch.float64})
def test_moved_is_false_where_nothing_moves(single):
    """At a loss near 1e-36 the scale of a hypergradient underflows in single precision."""
    training = Training(
        functional.plain(lambda params, x: x * (params["w"] - 1).square().sum()), SGD(), {"w": Scalar()}
    )
    params = {"w": torch.zeros(2, dtype=single)}
    meta = training.init_meta(params, lr=0.1)
    online = Online(training, SGD(), ("precond", "lr"))
    outer_meta = online.init_meta(meta, lr=0.1)
    for scale in (1.0, 1e-36, 0.0):
        state = online.init(meta, training.init(params))
        for _ in range(3):
            before = state
            state, info = online.step(outer_meta, state, torch.tensor(scale, dtype=single))
            same = all(map(torch.equal, tree.leaves(before.meta), tree.leaves(state.meta)))
            assert bool(info["moved"]) == (not same)
