"""FOP takes the steps of `Online`: bit for bit around SGD and momentum, to rounding around Adam."""

from copy import deepcopy

import pytest
import torch
from problems import (
    FAMILIES,
    OPTIMIZERS,
    assert_near,
    assert_same_bits,
    attention,
    batch_loss,
    convnet,
    every,
    fits,
    gru,
    mlp,
)
from torch import nn

from metafop import SGD, Adam, Dense, Identity, LowRank, Meta, Momentum, Online, Spatial, tree
from metafop.optim import FOP
from metafop.safeguards import scale_free

BITWISE = {name: setting for name, setting in OPTIMIZERS.items() if not isinstance(setting.optimizer, Adam)}
ROUNDED = {name: setting for name, setting in OPTIMIZERS.items() if isinstance(setting.optimizer, Adam)}
META_LR = 0.01


def both(problem, setting, family, batches, meta_lrs=None, **settings):
    """Return parameters and M, by name, after each step of FOP and after each of Online."""
    model = deepcopy(problem.model)
    chosen = {k: family if fits(family, p.shape) else Identity() for k, p in problem.params.items()}
    meta_optimizer = settings.get("meta_optimizer", Adam())
    asked = {"interval": 1, "meta_lr": META_LR} | settings
    named = model.named_parameters()
    optimizer = FOP(named, setting.twin.func, preconditioner=chosen, **asked, **setting.twin.keywords)
    ours = []
    for batch in batches:
        optimizer.zero_grad()
        batch_loss(model, batch).backward()
        optimizer.step()
        params = {k: p.detach().clone() for k, p in model.named_parameters()}
        ours.append((params, tree.copy(optimizer.inspect()[1].precond)))

    training = problem.training(setting.optimizer, family)
    meta = training.init_meta(problem.params, torch.Generator(), **setting.hyper()._asdict())
    meta = Meta(meta.hyper, meta.precond | ours[0][1])  # nothing has moved in the first step
    names = {"precond": "precond", "lr": "lr", "momentum": "momentum"}
    learn = tuple(names[name] for name in settings.get("learn", ["precond"]))
    online = Online(
        training,
        meta_optimizer,
        learn,
        settings.get("order", "exact"),
        settings.get("credit", "velocity"),
        guards=(scale_free,) if settings.get("scale_free", True) else (),
    )
    state = online.init(meta, training.init(problem.params, problem.buffers))
    theirs = []
    for i, batch in enumerate(batches):
        lr = META_LR if meta_lrs is None else meta_lrs[i]
        state, _ = online.step(online.init_meta(meta, lr=lr), state, batch)
        precond = {k: m for k, m in state.meta.precond.items() if tree.leaves(m)}
        theirs.append((state.params, precond))
    return ours, theirs


@pytest.mark.parametrize("scale_free", [True, False])
@pytest.mark.parametrize("credit", ["velocity", "gradient"])
@pytest.mark.parametrize("order", ["exact", "paper"])
@pytest.mark.parametrize("make", [mlp, convnet])
@every("setting", BITWISE)
def test_around_sgd_and_momentum_every_bit_is_that_of_online(
    setting, make, order, credit, scale_free, generator
):
    problem = make(generator)
    family = LowRank(2) if make is mlp else Spatial()
    settings = {"order": order, "credit": credit, "scale_free": scale_free}
    assert_same_bits(*both(problem, setting, family, 3 * problem.batches, **settings))


@every("family", {k: f for k, f in FAMILIES.items() if "identity" not in k})
def test_every_family_learns_the_same_bits(family, generator):
    problem = convnet(generator)
    assert_same_bits(*both(problem, OPTIMIZERS["heavy ball"], family, 2 * problem.batches))


@pytest.mark.parametrize("make", [gru, attention])
def test_other_models_learn_the_same_bits(make, generator):
    problem = make(generator)
    assert_same_bits(*both(problem, OPTIMIZERS["heavy ball, decayed"], Dense(), 2 * problem.batches))


@pytest.mark.parametrize("meta_optimizer", [SGD(), Momentum(), Momentum(nesterov=True), Adam()], ids=repr)
def test_any_pure_optimizer_moves_m(meta_optimizer, generator):
    problem = convnet(generator)
    setting = OPTIMIZERS["nesterov"]
    assert_same_bits(*both(problem, setting, Dense(), 2 * problem.batches, meta_optimizer=meta_optimizer))


@pytest.mark.parametrize("credit", ["velocity", "gradient"])
@pytest.mark.parametrize("scale_free", [True, False])
@every("setting", ROUNDED)
def test_around_adam_the_derivative_is_that_of_online(setting, scale_free, credit, generator):
    problem = mlp(generator)
    settings = {"credit": credit, "scale_free": scale_free}
    ours, theirs = both(problem, setting, LowRank(2), 3 * problem.batches, **settings)
    assert_near(ours[-1], theirs[-1], 1e-9)


@pytest.mark.parametrize("scale_free", [True, False])
@pytest.mark.parametrize("learn", [("lr",), ("momentum",), ("precond", "lr", "momentum")], ids=str)
def test_a_learned_lr_and_momentum_are_those_of_online(learn, scale_free, generator):
    problem = mlp(generator)
    settings = {"learn": learn, "scale_free": scale_free}
    family = Dense() if "precond" in learn else Identity()
    ours, theirs = both(problem, OPTIMIZERS["nesterov, decayed"], family, 3 * problem.batches, **settings)
    assert_near(ours[-1], theirs[-1], 1e-10)


@pytest.mark.parametrize("credit", ["velocity", "gradient"])
@every("setting", ROUNDED)
def test_around_adam_a_learned_lr_and_m_are_those_of_online(setting, credit, generator):
    problem = mlp(generator)
    settings = {"learn": ("precond", "lr"), "credit": credit}
    ours, theirs = both(problem, setting, Dense(), 3 * problem.batches, **settings)
    assert_near(ours[-1], theirs[-1], 1e-9)


@pytest.mark.parametrize("interval", [2, 3, 7])
def test_between_two_updates_m_stays_the_same(interval, generator):
    problem = convnet(generator)
    batches = 4 * problem.batches
    rests = [META_LR if i % interval == 0 else 0.0 for i in range(len(batches))]
    settings = {"interval": interval, "meta_optimizer": SGD()}
    assert_same_bits(*both(problem, OPTIMIZERS["heavy ball"], Dense(), batches, rests, **settings))


def test_around_an_unknown_base_the_rule_is_that_of_gradient_descent(generator):
    problem = mlp(generator)
    p = nn.Parameter(problem.params["0.weight"].clone())
    optimizer = FOP(
        [p],
        torch.optim.RMSprop,
        lr=0.1,
        preconditioner=Dense(),
        interval=1,
        meta_optimizer=SGD(),
        meta_lr=1.0,
        scale_free=False,
    )
    first, second = torch.randn(2, *p.shape, generator=generator)
    for grad in (first, second):
        p.grad = grad
        optimizer.step()
    expected = torch.eye(3) + 0.1 * (second.T @ first + first.T @ second)
    torch.testing.assert_close(optimizer.state[p]["fop_m0"], expected, rtol=1e-14, atol=1e-14)
