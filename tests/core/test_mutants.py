"""Errors planted into the library's mathematics do not pass: `verify` finds each, and says in what it is."""

import __future__

import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from problems import every

from metafop import Adam, Momentum, Training, verify
from metafop.hypergradients import (
    Adjoint,
    Autograd,
    ConjugateGradients,
    Forward,
    Implicit,
    Neumann,
    ReversibleAdjoint,
)
from metafop.hypergradients.step_jvp import StepJVP
from metafop.hypergradients.step_vjp import StepVJP
from metafop.hypergradients.steps import RecordedSteps
from metafop.preconditioners import gram
from metafop.verify import Report


class Mutant(NamedTuple):
    """A function of the library with other text in one place, and the check that is to find it.

    parts: the start of the names of the parts in which the derivative is then wrong.
    """

    owner: Any  # where it is looked up: a class, or a module that uses it
    name: str
    old: str
    new: str
    check: Callable[[], Report]
    parts: tuple[str, ...]


def planted(mutant: Mutant) -> Any:
    """Return the function with the error in it."""
    found = inspect.getattr_static(mutant.owner, mutant.name)
    function = getattr(found, "__func__", found)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.name} has {mutant.old!r} {source.count(mutant.old)} times"
    code = compile(
        source.replace(mutant.old, mutant.new),
        f"<{mutant.name} with an error>",
        "exec",
        flags=__future__.annotations.compiler_flag,
    )
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    return made[function.__name__]


def module(name: str) -> Any:
    """Return a module of the library: some have the name of an estimator, which hides them."""
    return sys.modules[f"metafop.{name}"]


rule = partial(verify.check, lr=0.3)
ball = partial(verify.check, Momentum(), lr=0.3, momentum=0.3)
nesterov = partial(verify.check, Momentum(nesterov=True), lr=0.3, momentum=0.3)
adam = partial(verify.check, Adam(), lr=0.3, betas=(0.5, 0.8), eps=1e-2, weight_decay=0.1)

mixed = partial(Mutant, Training, "_loss_pullback", check=rule, parts=("loss",))
RULES = {
    "no mixed derivative": mixed("tree.pull(grads, given.leaves, d_grads)", "tree.zeros_like(meta.loss)"),
    "a mixed derivative without P": mixed("self.precondition(meta.precond, d_direction)", "d_direction"),
    "a mixed derivative at leaves that have moved": mixed("grads, given.leaves", "grads, meta.loss"),
    "a mixed derivative at the next parameters": mixed(
        "last.carry, given", "self.advance(meta, last.carry, last.seen)[0], given"
    ),
    "autograd that does not see leaves": Mutant(
        module("verify.rules"), "by_autograd", "if given:", "if False:", rule, ("loss",)
    ),
    "the heavy ball's new velocity for the old": Mutant(
        Momentum, "pullback", "dot(a, opt[k])", "dot(a, velocity[k])", ball, ("hyper.momentum",)
    ),
    "Nesterov: the velocity for what moves": Mutant(
        Momentum, "pullback", "dot(c, ahead[k])", "dot(c, velocity[k])", nesterov, ("hyper.lr",)
    ),
    "Nesterov without what is ahead": Mutant(
        Momentum,
        "toward_after",
        " * (1 + at(hyper.momentum, k))",
        "",
        nesterov,
        ("hyper.weight_decay", "precond", "loss"),
    ),
    "Adam's weight decay with the other sign": Mutant(
        Adam,
        "pullback",
        "= at(gain, k) * tree.dot(c, p)",
        "= -at(gain, k) * tree.dot(c, p)",
        adam,
        ("hyper.weight_decay",),
    ),
    "Adam without the derivative of a correction": Mutant(
        Adam, "pullback", "part.ahead) * t * power1", "part.ahead) * power1", adam, ("hyper.betas.0",)
    ),
    "Adam with half of the second moment": Mutant(
        Adam, "pullback", "(2 * number.rest2", "(number.rest2", adam, ("precond", "loss")
    ),
    "P's derivative without its transpose": Mutant(
        gram, "pullback_crossed", "(x + x.mT)", "(2 * x)", rule, ("precond",)
    ),
}


def unlooked(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Report]:
    """Return the check of an estimator that does not look whether what is taken again comes out the same."""
    return partial(verify.check_estimator, make(*args, skip=("repeat", "hessian", "buffers"), **kwargs))


ALL, IN_META = ("hyper", "precond", "loss", "start"), ("hyper", "precond", "loss")
back, ahead = unlooked(Adjoint), unlooked(Forward)
pushed = unlooked(Adjoint, over="forward")  # whose steps torch.func takes
forward_again = partial(Mutant, RecordedSteps, "forward", check=back, parts=ALL)
step_back = partial(Mutant, RecordedSteps, "backward", check=back, parts=ALL)
PULL, EARLY = "step_vjp(meta, before, batch, cotangent)", "cotangent = pulled if t else cotangent"
BACK = {
    "no mixed derivative": Mutant(
        module("hypergradients.steps"),
        "recorded",
        "evaluate(own_meta,",
        "evaluate(meta,",
        back,
        ("loss",),
    ),
    "no Hessian": Mutant(
        module("hypergradients.steps"),
        "recorded",
        "evaluate(own_meta, constant",
        "evaluate(own_meta, carry",
        back,
        ALL,
    ),
    "no mixed derivative, by torch.func": Mutant(
        module("hypergradients.step_vjp"), "inputs_of", ", *leaves]", "]", pushed, ("loss",)
    ),
    "no Hessian, by torch.func": Mutant(
        StepVJP, "__call__", "d_floats[place] + d", "d_floats[place]", pushed, ALL
    ),
    "no mixed derivative, differentiated forward": Mutant(
        StepVJP, "_over_forward", "*pulling[1](d_read)[0]", "*tree.zeros_like(leaves)", pushed, ("loss",)
    ),
    "at the carry after the step": forward_again(
        "meta, kept,", "meta, self.training.step(self.meta, kept, batch_at(self.batches, t))[0],"
    ),
    "on the batch of the step before": forward_again("batch_at(self.batches, t)", "self.batches[t - 1]"),
    "the last step left out": step_back(
        "x if d is None else x + d", "x if d is None or not self.batches[t + 1 :] else x + d", parts=IN_META
    ),
    "a start of one step later": step_back(
        "torch.zeros_like(x) if d is None else d",
        "torch.zeros_like(x) if d is None or t == 0 else d",
        parts=("start",),
    ),
    "a start of one step later, reversible": Mutant(
        ReversibleAdjoint,
        "_there_and_back",
        f"cotangent, again = {PULL}",
        f"pulled, again = {PULL}; {EARLY}",
        unlooked(ReversibleAdjoint),
        ("start",),
    ),
    "a start that is held, by autograd": Mutant(
        Autograd, "_estimate", "_at = rebuild(start)", "_at = carry", unlooked(Autograd), ("start",)
    ),
    "an outer loss whose own derivative is forgotten": Mutant(
        module("hypergradients.adjoint"),
        "differentiated",
        "_in_meta(outer_loss, meta, carry)",
        "tree.zeros_like(meta)",
        back,
        IN_META,
    ),
}
FORWARD = {
    "no mixed derivative": Mutant(
        StepJVP, "_inputs", "map(self.basis.get, names)", "(None for _ in names)", ahead, ("loss",)
    ),
    "no derivative of the step itself": Mutant(
        StepJVP, "__call__", "(basis, ", "(tree.zeros_like(basis), ", ahead, ("hyper", "precond")
    ),
    "a start of zeros": Mutant(
        module("hypergradients.forward"),
        "_fitting",
        "basis.get(f",
        "{}.get(f",
        unlooked(Forward, ("start",)),
        ("start",),
    ),
    "an outer loss whose own derivative is forgotten": Mutant(
        module("hypergradients.forward"), "_by_place", "named[k] + d for", "d for", ahead, IN_META
    ),
}

plain = unlooked(Implicit, ConjugateGradients(iterations=8))  # as many as there are parameters
at_end = partial(Mutant, Implicit, "_estimate", check=plain, parts=("loss",))
conjugate = partial(Mutant, ConjugateGradients, "__call__", check=plain, parts=("loss",))
GRADIENT = "MeanGradient.of(training, meta, "
MINIMUM = {
    "no minus": at_end("torch.sub, outer", "torch.add, outer"),
    "an outer loss whose own derivative is forgotten": at_end("torch.sub, outer", "lambda _, x: -x, outer"),
    "no mixed derivative": at_end(
        "pulled_in_leaves(found.solution.x)", "pulled_in_leaves(0 * found.solution.x)"
    ),
    "where the run starts": at_end(f"{GRADIENT}after", f"{GRADIENT}carry"),
    "with the buffers of the start": at_end(
        f"{GRADIENT}after", f"{GRADIENT}after._replace(buffers=carry.buffers)"
    ),
    "with the parameters of the start": at_end(
        f"{GRADIENT}after", f"{GRADIENT}after._replace(params=carry.params)"
    ),
    "an outer loss of the start": at_end(
        "differentiated(outer_loss, meta, after)", "differentiated(outer_loss, meta, carry)"
    ),
    "conjugate gradients: ⟨r, z⟩ before and after exchanged": conjugate(
        "z + size / torch.where(before > 0, before, 1.0)", "z + before / torch.where(size > 0, size, 1.0)"
    ),
    "conjugate gradients that are steepest descent": conjugate("z + size /", "z + 0 * size /"),
    "conjugate gradients: the residual of before": conjugate("going, r @ z", "going, (r + step * along) @ z"),
    "conjugate gradients: a scale that is forgotten on the way": conjugate(
        "z = r / scale\n        size, before",
        "z = r\n        size, before",
        check=unlooked(Implicit, ConjugateGradients(iterations=8, probes=20)),
    ),
    "a Neumann series that subtracts": Mutant(
        Neumann, "__call__", "x + rate * (b", "x - rate * (b", unlooked(Implicit, Neumann()), ("loss",)
    ),
}


@every("mutant", RULES)
def test_an_error_in_the_derivative_of_a_step_is_found(mutant, monkeypatch):
    assert_found(mutant, monkeypatch)


@every("mutant", BACK)
def test_an_error_on_the_way_back_is_found(mutant, monkeypatch):
    assert_found(mutant, monkeypatch)


@every("mutant", FORWARD)
def test_an_error_on_the_way_forward_is_found(mutant, monkeypatch):
    assert_found(mutant, monkeypatch)


@every("mutant", MINIMUM)
def test_an_error_at_a_minimum_is_found(mutant, monkeypatch):
    assert_found(mutant, monkeypatch)


def assert_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.owner, mutant.name, planted(mutant))
    report = mutant.check()
    wrong = [row.part for row in report.rows if not row.ok]
    assert wrong, f"it passes:\n{report}"
    assert all(part.startswith(mutant.parts) for part in wrong), f"others are wrong:\n{report}"
    assert all(any(part.startswith(start) for part in wrong) for start in mutant.parts), f"not all:\n{report}"
    assert report.worst.worst_at.startswith(mutant.parts)


@every("check", {"sgd": rule, "ball": ball, "nesterov": nesterov, "adam": adam, "back": back, "end": plain})
def test_without_an_error_the_same_checks_pass(check):
    assert check().ok
