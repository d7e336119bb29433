"""Bad input gets one sentence that names the object, the value and the remedy."""

from typing import Any, cast

import pytest
import torch
from problems import assert_clear, mlp
from torch import nn
from torch.nn import functional as F

from metafop import (
    SGD,
    Adam,
    Bounded,
    Dense,
    Kronecker,
    LowRank,
    Meta,
    Momentum,
    Normalized,
    Online,
    Rescaled,
    SGDHyper,
    Spatial,
    Training,
    Unrolled,
    assign,
    functional,
    safeguards,
    tree,
    verify,
)
from metafop.hypergradients import Adjoint, adjoint, by_autograd

loss = functional.plain(lambda params, batch: torch.stack([p.sum() for p in params.values()]).square().sum())
weights = {"w": torch.ones(3, 4)}
training = Training(loss, SGD(), {"w": Dense()})


def online(meta=None, params=weights, **settings):
    learner = Online(training, SGD(), **settings)
    return learner.init(meta or training.init_meta(weights, lr=0.1), training.init(params))


def evaluated(training, params, batch):
    return training.evaluate(training.init_meta(params, lr=0.1), training.init(params), batch)


def stepped(loss, batch=None):
    return evaluated(Training(loss, SGD()), weights, batch)


def stepped_module(model):
    pure, params, _ = functional.from_module(model, lambda model, batch: model(batch).sum())
    return evaluated(Training(pure, SGD()), params, torch.ones(4, 2))


def noisy():
    return functional.from_module(
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), lambda model, batch: model(batch).sum()
    )


CASES = {
    "rank 0": (lambda: LowRank(rank=0), ["LowRank", "rank=0", "Identity()"]),
    "rank too large": (lambda: LowRank(rank=9).init(weights["w"]), ["LowRank(rank=9", "(3, 4)", "at most 4"]),
    "sigma 0": (lambda: LowRank(sigma=0.0), ["LowRank", "sigma=0.0", "0.01"]),
    "no generator": (lambda: LowRank().init(weights["w"]), ["LowRank", "generator", "manual_seed"]),
    "spatial on a matrix": (lambda: Spatial().init(weights["w"]), ["Spatial", "(3, 4)", "LowRank"]),
    "kronecker on a vector": (lambda: Kronecker().init(torch.ones(3)), ["Kronecker", "(3,)", "Dense"]),
    "bound of 0": (lambda: Bounded(Dense(), limit=0.0), ["Bounded", "limit=0.0", "1"]),
    "rescaled to 0": (lambda: Rescaled(Dense(), limit=-1.0), ["Rescaled", "limit=-1.0", "1/L"]),
    "clip at 0": (lambda: safeguards.clip(0.0), ["clip", "0.0", "positive"]),
    "bound norm at 0": (lambda: safeguards.bound_norm(-2.0), ["bound_norm", "-2.0", "positive"]),
    "negative lr": (lambda: SGD().hyper(lr=-0.1), ["SGD()", "lr", "-0.1", "zero or more"]),
    "negative lr of one": (lambda: SGD().hyper(lr={"w": -0.1}), ["SGD()", "lr['w']", "-0.1"]),
    "lr not a number": (lambda: SGD().hyper(lr=float("nan")), ["SGD()", "lr", "nan"]),
    "decay of 1": (lambda: Momentum().hyper(lr=0.1, momentum=1.0), ["Momentum", "momentum", "1", "below 1"]),
    "beta above 1": (
        lambda: Adam().hyper(lr=0.1, betas=(0.9, 1.5)),
        ["Adam()", "betas[1]", "1.5", "below 1"],
    ),
    "eps of 0": (lambda: Adam().hyper(lr=0.1, eps=0.0), ["Adam()", "eps", "0", "above zero"]),
    "lr of a shape": (lambda: SGD().hyper(lr=torch.ones(2)), ["SGD()", "lr", "(2,)", "vmap"]),
    "integer lr": (lambda: SGD().hyper(lr=torch.tensor(1)), ["SGD()", "lr", "int64", "float"]),
    "lr by wrong names": (
        lambda: training.init_meta(weights, lr={"v": 0.1}),
        ["SGD()", "lr", "['v']", "['w']", "'*' for the rest"],
    ),
    "a pattern that fits nothing": (
        lambda: training.init_meta(weights, lr={"v*": 0.1, "*": 0.2}),
        ["SGD()", "lr", "['v*', '*']", "['w']"],
    ),
    "a pattern behind another": (
        lambda: training.init_meta(weights, lr={"*": 0.1, "w": 0.2}),
        ["SGD()", "lr", "['*', 'w']"],
    ),
    "another optimizer's hyperparameter": (
        lambda: training.init_meta(weights, lr=0.1, momentum=0.9),
        ["SGD()", "lr, weight_decay", "got momentum", "Momentum()"],
    ),
    "an unknown hyperparameter": (
        lambda: training.init_meta(weights, learning_rate=0.1),
        ["SGD()", "lr, weight_decay", "got learning_rate"],
    ),
    "no lr": (lambda: training.init_meta(weights), ["SGD()", "needs a value for lr", "Pass lr=..."]),
    "one beta": (
        lambda: Adam().hyper(lr=0.1, betas=cast(Any, 0.9)),
        ["Adam()", "2 values for betas", "0.9", "tuple"],
    ),
    "a hyper for a meta": (
        lambda: training.step(cast(Any, SGD().hyper(lr=0.1)), training.init(weights), None),
        ["Meta", "SGDHyper", "training.init_meta"],
    ),
    "a leaf of meta that is a float": (
        lambda: training.step(
            Meta(SGD().hyper(lr=0.1)._replace(lr=cast(Any, 0.1)), {"w": ()}), training.init(weights), None
        ),
        ["hyper.lr is 0.1", "float", "torch.tensor(0.1)"],
    ),
    "a hyper for an outer meta": (
        lambda: Online(training, SGD()).step(cast(Any, SGD().hyper(lr=0.1)), online(), None),
        ["Online", "SGDHyper", "online.init_meta"],
    ),
    "a carry for a meta": (
        lambda: training.step(
            cast(Any, training.init(weights)), cast(Any, training.init_meta(weights, lr=0.1)), None
        ),
        ["carry", "Meta", "training.init"],
    ),
    "a rate without its name": (
        lambda: training.init_meta(weights, cast(Any, 0.1)),
        ["torch.Generator", "0.1", "by name: lr=0.1"],
    ),
    "a float in a meta that is differentiated": (
        lambda: adjoint(
            training, lambda carry: carry.params["w"].sum(), _with_float(), training.init(weights), [None]
        ),
        ["hyper.lr is 0.1", "torch.tensor(0.1)"],
    ),
    "a sparse embedding": (
        lambda: adjoint(*_sparse(), [torch.tensor([0, 1])]),
        ["sparse gradient", "'w'", "sparse=False"],
    ),
    "torch's optimizer": (
        lambda: Training(loss, cast(Any, torch.optim.SGD)),
        ["torch.optim.sgd.SGD", "metafop.SGD()", "metafop.Momentum()"],
    ),
    "an object of torch's optimizer": (
        lambda: Training(loss, cast(Any, torch.optim.AdamW([torch.ones(2)]))),
        ["torch.optim.adamw.AdamW", "metafop.Adam()"],
    ),
    "an optimizer of torch that is not here": (
        lambda: Training(loss, cast(Any, torch.optim.Rprop)),
        ["Rprop", "domains, init and update"],
    ),
    "an optimizer that lacks a method": (
        lambda: Training(loss, cast(Any, "sgd")),
        ["'sgd'", "domains, init, update", "Adam()"],
    ),
    "an estimator's name": (
        lambda: Unrolled(training, SGD(), estimator=cast(Any, "adjoint")),
        ["Unrolled", "'adjoint'", "metafop.hypergradients.adjoint"],
    ),
    "empty tree": (lambda: training.init({}), ["parameters", "empty", "at least one"]),
    "integer parameters": (
        lambda: training.init({"w": torch.ones(2, dtype=torch.int32)}),
        ["'w'", "int32", "Convert"],
    ),
    "complex parameters": (
        lambda: training.init_meta({"w": torch.ones(2, dtype=torch.complex64)}, lr=0.1),
        ["'w'", "complex64", "view_as_real"],
    ),
    "not a tensor": (lambda: training.init({"w": cast(Any, [1.0])}), ["'w'", "list", "Convert"]),
    "unknown parameter": (
        lambda: training.init_meta({"v": torch.ones(2)}, lr=0.1),
        ["'w'", "['v']", "Correct the name"],
    ),
    "a loss that is not scalar": (
        lambda: stepped(functional.plain(lambda params, batch: params["w"].sum(0))),
        ["loss", "(4,)", "mean()"],
    ),
    "a loss without buffers": (
        lambda: stepped(lambda params, buffers, batch: params["w"].sum()),
        ["loss", "Tensor", "functional.plain"],
    ),
    "a tree that changes": (
        lambda: training.step(
            training.init_meta(weights, lr=0.1), training.init({"v": torch.ones(3, 4)}), None
        ),
        ["['v']", "['w']", "training.init_meta"],
    ),
    "a shape that changes": (
        lambda: online(params={"w": torch.ones(3, 8)}),
        ["Dense()", "'w'", "(3, 8)", "4, 4", "8, 8", "training.init_meta"],
    ),
    "a rule that fits nothing": (
        lambda: assign(weights, {"conv*": Spatial()}),
        ["'conv*'", "['w']", "Correct"],
    ),
    "dropout": (noisy, ["Dropout", "training mode", "eval mode"]),
    "unknown order": (lambda: online(order="first"), ["order", "'first'", "exact"]),
    "unknown credit": (lambda: online(credit="all"), ["credit", "'all'", "velocity"]),
    "learn a string": (lambda: online(learn="precond"), ["learn='precond'", '("precond", "lr")']),
    "learn what is not there": (
        lambda: online(learn=("momentum",)),
        ["'momentum'", "'lr'", "Name one"],
    ),
    "learn from the boundary": (
        lambda: online(learn=("weight_decay",)),
        ["hyper.weight_decay", "0", "boundary", "Start inside"],
    ),
    "meta lr by wrong names": (
        lambda: Online(training, SGD()).init_meta(training.init_meta(weights, lr=0.1), lr={"w": 0.1}),
        ["lr", "['w']", "['precond.w']"],
    ),
    "a tower on the paper's order": (
        lambda: Online(Online(training, SGD(), order="paper"), SGD(), ("lr",)),
        ["Online", "paper", "exact"],
    ),
    "autograd with credit": (
        lambda: Online(Training(loss, Momentum(), {"w": Dense()}), SGD(), hypergradient=by_autograd).step(
            *_momentum_state(), None
        ),
        ["by_autograd", "credit", "closed_form"],
    ),
    "a generator of parameters": (
        lambda: training.init(cast(Any, iter([]))),
        ["parameters", "dict", "from_module"],
    ),
    "a module's own parameters": (
        lambda: training.init({"w": nn.Parameter(torch.ones(2))}),
        ["'w'", "nn.Parameter", "detach()"],
    ),
    "hyper by hand, negative": (
        lambda: training.init_meta(weights, **SGDHyper(torch.tensor(-0.1), torch.tensor(0.0))._asdict()),
        ["SGD()", "lr", "-0.1"],
    ),
    "hyper in words": (lambda: SGD().hyper(lr=cast(Any, "fast")), ["SGD()", "lr", "'fast'", "float"]),
    "lr that is a bool": (lambda: SGD().hyper(lr=True), ["SGD()", "lr", "True", "Pass a float"]),
    "momentum that is a bool": (
        lambda: Momentum().hyper(lr=0.1, momentum=True),
        ["Momentum", "momentum", "True", "Pass a float"],
    ),
    "beta of one that is a bool": (
        lambda: Adam().hyper(lr=0.1, betas=({"w": False}, 0.9)),
        ["Adam()", "betas[0]['w']", "False", "Pass a float"],
    ),
    "lr that is a tensor of a bool": (
        lambda: SGD().hyper(lr=torch.tensor(True)),
        ["SGD()", "lr", "torch.bool", "Pass a float"],
    ),
    "lr that is none": (lambda: SGD().hyper(lr=cast(Any, None)), ["SGD()", "lr", "None", "Pass a float"]),
    "lr that is complex": (lambda: SGD().hyper(lr=cast(Any, 1j)), ["SGD()", "lr", "1j", "Pass a float"]),
    "lr that is a tensor of a complex": (
        lambda: SGD().hyper(lr=torch.tensor(1j)),
        ["SGD()", "lr", "complex", "Pass a float"],
    ),
    "momentum not a number": (
        lambda: Momentum().hyper(lr=0.1, momentum=float("nan")),
        ["Momentum", "momentum", "nan", "below 1"],
    ),
    "hyper by hand, a bool": (
        lambda: training.init_meta(weights, **SGDHyper(cast(Any, True), torch.tensor(0.0))._asdict()),
        ["SGD()", "lr", "True", "Pass a float"],
    ),
    "a seed for a generator": (
        lambda: training.init_meta(weights, cast(Any, 0), lr=0.1),
        ["torch.Generator", "0", "manual_seed"],
    ),
    "an optimizer's class": (lambda: Training(loss, cast(Any, SGD)), ["class SGD", "SGD()"]),
    "a meta-optimizer's class": (lambda: Online(training, cast(Any, Adam)), ["class Adam", "Adam()"]),
    "one family for all": (
        lambda: Training(loss, SGD(), cast(Any, Dense())),
        ["by parameter name", "Dense()", "assign"],
    ),
    "a family's class": (lambda: Training(loss, SGD(), cast(Any, {"w": Dense})), ["'w'", "Dense", "Dense()"]),
    "a plain loss": (
        lambda: Training(cast(Any, lambda params, batch: params["w"].sum()), SGD()),
        ["(params, buffers, batch)", "functional.plain"],
    ),
    "a loss that is a float": (
        lambda: stepped(lambda params, buffers, batch: (cast(Any, 1.0), {})),
        ["loss", "float", "tensor"],
    ),
    "a loss that counts": (
        lambda: stepped(functional.plain(lambda params, batch: (params["w"] > 0).sum())),
        ["loss", "int64", "floating-point"],
    ),
    "buffers that are none": (
        lambda: stepped(lambda params, buffers, batch: (params["w"].sum(), cast(Any, None))),
        ["buffers", "NoneType", "{}"],
    ),
    "forgotten buffers": (
        lambda: stepped_module(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))),
        ["buffers", "running_mean", "training.init(params, buffers)"],
    ),
    "from_module, swapped": (
        lambda: functional.from_module(cast(Any, loss), cast(Any, nn.Linear(2, 2))),
        ["nn.Module", "function"],
    ),
    "one guard, not a tuple": (
        lambda: Online(training, SGD(), guards=cast(Any, safeguards.scale_free)),
        ["guards", "tuple", "scale_free"],
    ),
    "a wrapper of a class": (lambda: Normalized(cast(Any, Dense)), ["Normalized", "Dense", "Dense()"]),
    "the training's meta for the learner's": (
        lambda: Online(training, SGD()).step(training.init_meta(weights, lr=0.1), online(), None),
        ["online.init_meta(", "['w']", "Pass the former"],
    ),
    "names that collide": (
        lambda: Training(loss, SGD(), {"a": Kronecker(), "a.inputs": Dense()}).init_meta(
            {"a": torch.ones(3, 2), "a.inputs": torch.ones(2)}, lr=0.1
        ),
        ["'a.inputs'", "share names", "Rename"],
    ),
    "a rule without its hyper": (lambda: verify.check(optimizer=Adam()), ["Adam()", "lr", "Pass lr=..."]),
}


def _with_float():
    meta = training.init_meta(weights, lr=0.1)
    return meta._replace(hyper=meta.hyper._replace(lr=cast(Any, 0.1)))


def _sparse():
    embedded = Training(
        functional.plain(lambda params, batch: F.embedding(batch, params["w"], sparse=True).square().sum()),
        SGD(),
    )
    return (
        embedded,
        lambda carry: carry.params["w"].sum(),
        embedded.init_meta(weights, lr=0.1),
        embedded.init(weights),
    )


def _momentum_state():
    ball = Training(loss, Momentum(), {"w": Dense()})
    learner = Online(ball, SGD())
    meta = ball.init_meta(weights, lr=0.1)
    return learner.init_meta(meta, lr=0.1), learner.init(meta, ball.init(weights))


@pytest.mark.parametrize(("act", "words"), list(CASES.values()), ids=list(CASES))
def test_bad_input_gets_a_clear_sentence(act, words):
    assert_clear(act, words)


def test_a_batch_that_the_model_cannot_take_is_torchs_to_refuse(generator):
    problem = mlp(generator)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        evaluated(problem.training(SGD()), problem.params, (torch.ones(6, 9), None))


class NoPullback:
    def init(self, param, generator=None):
        return torch.ones(())

    def apply(self, m, grad):
        return m * grad


MORE = {
    "a module for a loss": (
        lambda: Training(cast(Any, nn.Linear(2, 2)), SGD()),
        ["module Linear", "functional.from_module"],
    ),
    "progress that is no function": (
        lambda: Adjoint(progress=cast(Any, True)),
        ["Adjoint", "progress", "True", "metafop.progress.Line()"],
    ),
    "a preconditioner without a pullback": (
        lambda: Training(loss, SGD(), {"w": cast(Any, NoPullback())}),
        ["init, apply and pullback", "'w'", "without pullback", "tree.pull"],
    ),
    "a seed that is an integer": (
        lambda: training.init(weights, {"seed": cast(Any, 7)}),
        ["'seed' is 7", "torch.tensor(7)"],
    ),
    "a loss for an outer loss": (
        lambda: adjoint(
            training, cast(Any, loss), training.init_meta(weights, lr=0.1), training.init(weights), [None]
        ),
        ["outer loss", "function of a carry", "lambda carry"],
    ),
    "a carry and an outer loss that are swapped": (
        lambda: adjoint(
            training, cast(Any, training.init(weights)), training.init_meta(weights, lr=0.1), sum, [None]
        ),
        ["carry", "builtin_function", "training.init"],
    ),
    "a name in short where a leaf is replaced": (
        lambda: tree.replace(training.init_meta(weights, lr=0.1), {"lr": torch.tensor(0.1)}),
        ["['lr']", "hyper.lr", "in full"],
    ),
    "a loss without the seed of its buffers": (
        lambda: _dropped(seeded=False)[0](
            _dropped(seeded=True)[1], _dropped(seeded=True)[2], torch.ones(1, 2)
        ),
        ["seed", "seeded=True"],
    ),
}


def _dropped(seeded):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model.train(seeded)
    return functional.from_module(model, lambda model, batch: model(batch).sum(), seeded=seeded)


@pytest.mark.parametrize(("act", "words"), list(MORE.values()), ids=list(MORE))
def test_what_is_easily_mistaken_gets_a_clear_sentence(act, words):
    test_bad_input_gets_a_clear_sentence(act, words)
