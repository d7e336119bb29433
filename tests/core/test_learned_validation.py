"""What cannot be learned, and tasks that cannot be: one sentence each, with the remedy."""

from typing import Any, cast

import pytest
import torch
from penalized import meta, params, penalized, training
from problems import assert_clear
from torch import nn

from metafop import SGD, Adam, Online, Tasks, Training, Unrolled, functional, tree
from metafop.hypergradients import Evolution, Forward, Truncated, adjoint, autograd, evolution, implicit
from metafop.optimizers import Unit


def learning(learn, estimator: Any = adjoint, start: Any = (), of=None):
    own = of or training()
    return Unrolled(own, Adam(), learn, estimator).init(meta(of=own), start)


def online(learn=("loss.l2",), batch: Any = None, **settings):
    own = training()
    return Online(own, Adam(), learn, **settings).init(meta(of=own), own.init(params), batch)


def tasks(batch: Any = None, carry=None, estimator: Any = None):
    three = Tasks(training(), 3)
    start, given = carry or three.init(params), torch.ones(3) if batch is None else batch
    if estimator is None:
        return three.step(meta(), start, given)
    return estimator(three, lambda carry: carry.params["w"].sum(), meta(), start, [given])


def held_out(params, buffers, batch):
    return params["w"].square().sum(), buffers


class Polyak(Training):
    def advance(self, meta, carry, seen):
        return super().advance(meta, carry, seen._replace(grads=tree.scale(seen.grads, seen.value)))


def _one_is_zero():
    class Below(Unit):
        def holds(self, value):
            return 0 <= value <= 1

    return training(loss_domains={"weights": Below()})


def _start_of_four():
    learner, four = Unrolled(training(), Adam(), ("start",)), {"w": torch.ones(4)}
    outer_meta, state = learner.init_meta(meta(), four, lr=0.1), learner.init(meta(), four)
    learner.step(outer_meta, state, lambda carry: carry.params["w"].sum(), training().init(params), [None])


LEARNED = {
    "what is not there": (lambda: learning(("loss.l1",)), ["'loss.l1'", "'loss.l2'", "init_meta(loss=...)"]),
    "what is not there, online": (lambda: online(("loss.l1",)), ["Online", "'loss.l1'", "'loss.l2'"]),
    "a family that is not there": (lambda: learning(("precond",)), ["'precond'", "a preconditioner"]),
    "the start from within": (lambda: online(("start",)), ["'start'", "from within", "Unrolled"]),
    "one of the start from within": (lambda: online(("lr", "start.w")), ["'start.w'", "Unrolled"]),
    "a start that is not given": (
        lambda: learning(("start",)),
        ["('start',)", "learner.init(meta, params)", "init_meta(meta, params"],
    ),
    "a start that is not learned": (lambda: learning(("lr",), start=params), ["('lr',)", '"start"']),
    "what is not in the start": (lambda: learning(("start.v",), start=params), ["'start.v'", "'start.w'"]),
    "a start of another shape": (
        lambda: _start_of_four(),
        ["{'w': (4,)}", "{'w': (3,)}", "training.init(params)"],
    ),
    "what Forward leaves out": (
        lambda: learning(("lr", "loss.l2"), Forward(("lr",))),
        ["'loss.l2'", "learn=('lr',)", "Name it there too"],
    ),
    "the start by Forward": (
        lambda: learning(("start",), Forward(), params),
        ["'start.w'", "Forward", "Name it there too"],
    ),
    "what Evolution leaves out": (
        lambda: learning(("loss",), Evolution(("lr",))),
        ["'loss.weights'", "Evolution", "Name it there too"],
    ),
    "the start by Evolution": (
        lambda: learning(("start",), evolution, params),
        ["where a run starts", "Evolution", "adjoint"],
    ),
    "lr by implicit": (
        lambda: learning(("lr",), implicit),
        ["Implicit", "'lr'", "leaves of the loss", "adjoint"],
    ),
    "lr by windows of implicit": (
        lambda: learning(("loss", "lr"), Truncated(2, implicit)),
        ["Implicit", "'lr'"],
    ),
    "the start by implicit": (lambda: learning(("start",), implicit, params), ["Implicit", "'start.w'"]),
    "a leaf on its boundary": (
        lambda: learning(("loss.weights",), of=_one_is_zero()),
        ["loss.weights[0] from 1", "boundary", "Start inside"],
    ),
    "a leaf without the form of a batch": (
        lambda: online(),
        ["('loss.l2',)", "online.init(meta, carry, batch)"],
    ),
    "a leaf and a batch of words": (
        lambda: online(batch=(torch.ones(3), "a")),
        ["keeps the batch", "'a', a str", "torch.tensor('a')"],
    ),
    "a validation loss without its batch": (
        lambda: online(validation=held_out, batch=torch.ones(3)),
        ["pairs", "Tensor of 3", "Pass both"],
    ),
    "a validation loss of three batches": (
        lambda: online(validation=held_out, batch=3 * (torch.ones(3),)),
        ["pairs", "tuple of 3"],
    ),
    "a validation loss with leaves": (
        lambda: online(validation=training().loss),
        ["validation loss", "leaves of meta", "estimator of many steps"],
    ),
    "a module for a validation loss": (
        lambda: online(validation=cast(Any, nn.Linear(1, 1))),
        ["validation", "module Linear", "functional.from_module"],
    ),
    "a plain validation loss": (
        lambda: online(validation=cast(Any, lambda params, batch: params["w"].sum())),
        ["validation", "functional.plain"],
    ),
}


SIDE_BY_SIDE = {
    "a batch of one task": (lambda: tasks(torch.ones(5)), ["Tasks(count=3)", "batch", "(5,)", "torch.stack"]),
    "a batch of no task": (lambda: tasks(torch.ones(())), ["a batch", "3 tasks", "shape ()"]),
    "a batch with words": (lambda: tasks((torch.ones(3), "a")), ["a batch", "3 tasks", "'a'"]),
    "a carry of one task": (
        lambda: tasks(carry=training().init({"w": torch.ones(4)})),
        ["Tasks(count=3)", "carry", "(4,)", "tasks.init(params)"],
    ),
    "a carry of one task, differentiated": (
        lambda: tasks(carry=training().init({"w": torch.ones(4)}), estimator=adjoint),
        ["carry", "(4,)", "tasks.init(params)"],
    ),
    "a batch of one task, differentiated": (
        lambda: tasks(torch.ones(5), estimator=autograd),
        ["batch", "(5,)"],
    ),
    "an outer loss for each task": (
        lambda: adjoint(
            Tasks(training(), 3),
            lambda carry: carry.params["w"].sum(1),
            meta(),
            Tasks(training(), 3).init(params),
            [torch.ones(3)],
        ),
        ["outer loss returns a scalar", "(3,)", "mean()"],
    ),
    "none": (lambda: Tasks(training(), 0), ["count of one or more", "0"]),
    "true": (lambda: Tasks(training(), True), ["count of one or more", "True"]),
    "of a learner": (lambda: Tasks(cast(Any, Online(training(), Adam())), 3), ["a Training", "got a Online"]),
    "of a class": (lambda: Tasks(cast(Any, Training), 3), ["class Training", "Training()"]),
    "of a training that reads its loss": (
        lambda: Tasks(Polyak(functional.plain(penalized), SGD()), 3),
        ["Polyak", "does not read the loss"],
    ),
    "at a minimum": (lambda: tasks(estimator=implicit), ["Implicit", "Tasks", "adjoint"]),
}


@pytest.mark.parametrize(("act", "words"), list(LEARNED.values()), ids=list(LEARNED))
def test_what_cannot_be_learned_gets_a_clear_sentence(act, words):
    assert_clear(act, words)


@pytest.mark.parametrize(("act", "words"), list(SIDE_BY_SIDE.values()), ids=list(SIDE_BY_SIDE))
def test_tasks_that_cannot_be_get_a_clear_sentence(act, words):
    assert_clear(act, words)
