"""Nothing is changed and nothing remembered: torch.func and torch.compile take every step as it is."""

import copy

import torch
from problems import (
    FAMILIES,
    MODELS,
    OPTIMIZERS,
    assert_near,
    assert_pure,
    assert_same_bits,
    convnet,
    every,
    moved,
)
from torch.func import grad, vmap

from metafop import (
    SGD,
    Adam,
    Carry,
    Last,
    LowRank,
    Meta,
    Momentum,
    Online,
    Spatial,
    Training,
    functional,
    tree,
)

FIELDS = {
    f"{name}, {field}": (setting, field)
    for name, setting in OPTIMIZERS.items()
    if name in ("sgd, decayed", "heavy ball, decayed", "nesterov, decayed", "adam, short")
    for field in setting.hyper()._fields
}
LEARN = ("precond", "lr")


def prepared(problem, setting, family, generator):
    training = problem.training(setting.optimizer, family)
    meta = training.init_meta(problem.params, generator, **setting.hyper()._asdict())
    return (
        training,
        Meta(meta.hyper, moved(meta.precond, generator)),
        training.init(problem.params, problem.buffers),
    )


def learner(problem, setting, family, generator):
    training, meta, carry = prepared(problem, setting, family, generator)
    learn = LEARN if tree.leaves(meta.precond) else LEARN[1:]
    online = Online(training, Adam(), learn)
    return online, online.init_meta(meta, lr=0.01), online.init(meta, carry)


def run(training, meta, carry, batches):
    for batch in batches:
        carry, _ = training.step(meta, carry, batch)
    return carry


@every("make", MODELS)
@every("setting", OPTIMIZERS)
def test_a_training_step_is_pure(setting, make, generator):
    problem = make(generator)
    training, meta, carry = prepared(problem, setting, LowRank(rank=2), generator)
    carry = run(training, meta, carry, problem.batches[:2])
    assert_pure(training.step, meta, carry, problem.batches[2])


@every("family", FAMILIES)
@every("setting", OPTIMIZERS)
def test_an_online_step_is_pure(setting, family, generator):
    problem = convnet(generator)
    online, outer_meta, state = learner(problem, setting, family, generator)
    state = run(online, outer_meta, state, problem.batches[:2])
    assert_pure(online.step, outer_meta, state, problem.batches[2])


@every("family", FAMILIES)
@every("setting", OPTIMIZERS)
def test_updates_and_pullbacks_are_pure(setting, family, generator):
    problem = convnet(generator)
    online, outer_meta, state = learner(problem, setting, family, generator)
    state = run(online, outer_meta, state, problem.batches[:2])
    grads = state.last_seen.grads
    credit, _ = online.training.credited(state.meta, state.memory, grads)
    assert_pure(online.training.pullback, state.meta, Last(state.last_carry, state.last_seen, credit), grads)
    assert_pure(setting.optimizer.update, state.meta.hyper, *state.carry[:2], grads)
    assert_pure(setting.optimizer.pullback, state.meta.hyper, *state.carry[:2], grads, grads)


def test_a_module_is_never_changed_by_its_training(generator):
    problem = convnet(generator)
    before, modes = copy.deepcopy(problem.model.state_dict()), [m.training for m in problem.model.modules()]
    online, outer_meta, state = learner(problem, OPTIMIZERS["adam"], Spatial(), generator)
    assert_pure(lambda: run(online, outer_meta, state, problem.batches))
    assert_same_bits(problem.model.state_dict(), before)
    assert [m.training for m in problem.model.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in problem.model.parameters())
    assert not any(p.requires_grad for p in problem.params.values())


@every("make", MODELS)
@every("setting, field", FIELDS)
def test_vmap_over_a_hyperparameter_is_a_loop(setting, field, make, generator):
    problem = make(generator)
    training, meta, carry = prepared(problem, setting, LowRank(rank=2), generator)

    def trained(value):
        hyper = setting.hyper(**{field: value})
        return run(training, Meta(hyper, meta.precond), carry, problem.batches[:3])

    factors = torch.tensor([0.5, 1.0, 1.2])
    values = tree.map(lambda x: x * factors + 1e-4, getattr(setting.hyper(), field))
    each = [tree.map(lambda x, i=i: x[i], values) for i in range(len(factors))]
    assert_near(vmap(trained)(values), tree.stack([trained(value) for value in each]), rtol=1e-12, size=1.0)


@every("make", MODELS)
@every("setting", OPTIMIZERS)
def test_vmap_over_seeds_is_a_loop(setting, make, generator):
    problem = make(generator)
    online, outer_meta, state = learner(problem, setting, LowRank(rank=2), generator)

    def trained(params):
        carry = Carry(params, setting.optimizer.init(params), problem.buffers)
        return run(online, outer_meta, online.init(state.meta, carry), problem.batches[:3])

    seeds = [moved(problem.params, generator) for _ in range(3)]
    assert_near(
        vmap(trained)(tree.stack(seeds)), tree.stack([trained(p) for p in seeds]), rtol=1e-10, size=1.0
    )


@every("family", {k: f for k, f in FAMILIES.items() if not k.endswith("identity")})
def test_vmap_over_what_is_learned_is_a_loop(family, generator):
    problem = convnet(generator)
    online, outer_meta, state = learner(problem, OPTIMIZERS["nesterov, decayed"], family, generator)

    def trained(precond):
        meta = Meta(state.meta.hyper, precond)
        return run(online, outer_meta, online.init(meta, state.carry), problem.batches[:3])

    several = [moved(state.meta.precond, generator, 0.1) for _ in range(3)]
    assert_near(
        vmap(trained)(tree.stack(several)), tree.stack([trained(m) for m in several]), 1e-10, size=1.0
    )


@every("make", MODELS)
@every("family", FAMILIES)
def test_the_derivative_through_online_steps_is_that_of_finite_differences(family, make, generator):
    problem = make(generator)
    online, outer_meta, state = learner(problem, OPTIMIZERS["nesterov, decayed"], family, generator)
    leaves = {k: leaf for k, leaf in tree.named(state.meta).items() if not k.endswith("time")}
    ways = {k: torch.randn(leaf.shape, generator=generator) for k, leaf in leaves.items()}

    def final(factor):
        meta = Meta(tree.scale(outer_meta.hyper, 1 + factor), {})
        learned = {k: leaves[k] * (1 + factor * way) for k, way in ways.items()}
        start = online.init(tree.replace(state.meta, learned), state.carry)
        after = run(online, meta, start, problem.batches[:3])
        return online.evaluate(meta, after, problem.batches[3]).value

    zero, h = torch.tensor(0.0), 1e-5
    difference = (final(zero + h) - final(zero - h)) / (2 * h)
    torch.testing.assert_close(grad(final)(zero), difference, rtol=1e-6, atol=1e-9)


@every("family", FAMILIES)
def test_the_derivative_through_online_steps_is_finite_where_learning_starts(family, generator):
    problem = convnet(generator)
    training = problem.training(SGD(), family)
    meta = training.init_meta(problem.params, generator, lr=0.1)
    online = Online(training, SGD(), LEARN if tree.leaves(meta.precond) else LEARN[1:])
    outer_meta, carry = online.init_meta(meta, lr=0.1), training.init(problem.params, problem.buffers)

    def final(meta):
        state = run(online, outer_meta, online.init(meta, carry), problem.batches[:3])
        return online.evaluate(outer_meta, state, problem.batches[3]).value

    assert tree.all_finite(grad(final)(meta))


def test_a_compiled_online_step_is_the_eager_one(generator):
    problem = convnet(generator)
    training = problem.training(Momentum(), Spatial())
    meta = training.init_meta(problem.params, generator, lr=0.05)
    online = Online(training, Adam(), LEARN)
    outer_meta = online.init_meta(meta, lr=0.01)
    state = online.init(meta, training.init(problem.params, problem.buffers))
    torch.compiler.reset()  # it gives up on code that other tests had it build often
    compiled, eager = torch.compile(online.step, fullgraph=True), online.step
    ours = theirs = state
    for i, batch in enumerate(problem.batches[:3]):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            ours, theirs = compiled(outer_meta, ours, batch)[0], eager(outer_meta, theirs, batch)[0]
    assert_near(ours, theirs, rtol=1e-10, size=1.0)


def test_a_compiled_learner_of_a_learner_is_the_eager_one(generator):
    training = Training(functional.plain(lambda params, batch: (params["w"] * batch).cos().sum()), SGD())
    params, batches = {"w": torch.randn(3, generator=generator)}, torch.randn(3, 3, generator=generator)
    meta, carry = training.init_meta(params, lr=0.1), training.init(params)
    online = Online(training, SGD(), ("lr",))
    outer_meta, state = online.init_meta(meta, lr=0.1), online.init(meta, carry)
    tower = Online(online, SGD(), ("lr",))
    top, both = tower.init_meta(outer_meta, lr=0.1), tower.init(outer_meta, state)
    torch.compiler.reset()  # it gives up on code that other tests had it build often
    compiled, eager = torch.compile(tower.step, fullgraph=True), tower.step
    ours = theirs = both
    for batch in batches:
        ours, theirs = compiled(top, ours, batch)[0], eager(top, theirs, batch)[0]
    assert_near(ours, theirs, rtol=1e-10)
