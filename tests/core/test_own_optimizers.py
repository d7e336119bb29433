"""An optimizer of one's own: three methods, and the rest by default."""

import copy
import io
from typing import Any, cast

import pytest
import torch
from problems import assert_near, assert_same_bits, every, mlp

from metafop import (
    SGD,
    Adam,
    Dense,
    Momentum,
    Online,
    Scheduled,
    Training,
    Unrolled,
    functional,
    tree,
    verify,
)
from metafop.hypergradients import Adjoint, adjoint, autograd
from metafop.optim import FOP
from metafop.optimizers import Free, Positive, Unit, at


class RMSprop:
    """v' = α v + (1 - α) d²,    θ' = θ - lr d / (√v' + eps)"""

    domains = {"lr": Positive(), "alpha": Unit(), "eps": Positive(zero=False)}  # noqa: RUF012

    def init(self, params):
        return tree.zeros_like(params)

    def update(self, hyper, params, opt, direction):
        square = {
            k: at(hyper.alpha, k) * opt[k] + (1 - at(hyper.alpha, k)) * d**2 for k, d in direction.items()
        }
        root = {k: torch.where(v > 0, torch.where(v > 0, v, 1.0).sqrt(), 0.0) for k, v in square.items()}
        new = {
            k: p - at(hyper.lr, k) * direction[k] / (root[k] + at(hyper.eps, k)) for k, p in params.items()
        }
        return new, square


class Lion:
    """θ' = θ - lr (sign(β1 m + (1 - β1) d) + weight_decay θ),    m' = β2 m + (1 - β2) d"""

    domains = {"lr": Positive(), "betas": (Unit(), Unit()), "weight_decay": Free()}  # noqa: RUF012

    def init(self, params):
        return tree.zeros_like(params)

    def update(self, hyper, params, opt, direction):
        beta1, beta2 = hyper.betas
        signs = {k: (beta1 * opt[k] + (1 - beta1) * d).sign() for k, d in direction.items()}
        new = {k: p - hyper.lr * (signs[k] + hyper.weight_decay * p) for k, p in params.items()}
        return new, {k: beta2 * opt[k] + (1 - beta2) * d for k, d in direction.items()}


class Defaults(RMSprop):
    """RMSprop with defaults for its hyperparameters."""

    def hyper(self, lr, alpha=0.99, eps=1e-8):
        from metafop.optimizers import named_tuple

        values = {"lr": lr, "alpha": alpha, "eps": eps}
        return named_tuple(values, map(torch.as_tensor, values.values()))


OWN = {
    "rmsprop": (RMSprop(), {"lr": 0.01, "alpha": 0.9, "eps": 1e-3}),
    "lion": (Lion(), {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}),
}


def prepared(optimizer, hyper, generator, family=None) -> Any:
    problem = mlp(generator)
    training = problem.training(optimizer, family)
    outer_loss = lambda carry: problem.loss(carry.params, {}, problem.batches[-1])[0]  # noqa: E731
    meta = training.init_meta(problem.params, generator, **hyper)
    return problem, (training, outer_loss, meta, training.init(problem.params), problem.batches[:-1])


def test_three_methods_train_as_torchs_optimizer(generator):
    problem, (training, _, meta, carry, _) = prepared(*OWN["rmsprop"], generator=generator)
    leaves = {k: p.clone().requires_grad_() for k, p in problem.params.items()}
    theirs = torch.optim.RMSprop(list(leaves.values()), lr=0.01, alpha=0.9, eps=1e-3)
    for batch in problem.batches:
        carry, _ = training.step(meta, carry, batch)
        theirs.zero_grad()
        problem.loss(leaves, {}, batch)[0].backward()
        theirs.step()
    assert_near(carry.params, tree.map(torch.detach, leaves), rtol=1e-12)


@every("optimizer, hyper", OWN)
def test_its_derivatives_are_those_by_autograd_and_by_differences(optimizer, hyper, generator):
    assert verify.check(optimizer, **hyper).ok
    _, window = prepared(optimizer, hyper, generator, Dense())
    swept = adjoint(*window)
    assert_near(swept.grads, autograd(*window).grads, rtol=1e-9)
    assert swept.info["notes"] == ()


def test_it_is_learned_online_unrolled_compiled_and_learns_others(generator):
    optimizer, hyper = OWN["rmsprop"]
    problem, window = prepared(optimizer, hyper, generator, Dense())
    training, outer_loss, meta, carry, batches = window
    assert_near(Adjoint(compile=True)(*window).grads, adjoint(*window).grads, rtol=1e-9)
    online = Online(training, RMSprop(), ("precond", "lr", "alpha"))
    outer_meta, state = online.init_meta(meta, lr=0.01, alpha=0.9, eps=1e-8), online.init(meta, carry)
    for batch in batches:
        state, _ = online.step(outer_meta, state, batch)
    assert state.meta.hyper.alpha != 0.9
    learner = Unrolled(training, optimizer, ("lr",))
    state, info = learner.step(
        learner.init_meta(meta, **hyper), learner.init(meta), outer_loss, carry, problem.batches
    )
    assert info["moved"]


def test_it_can_have_a_schedule_and_defaults_of_its_own(generator):
    scheduled = Scheduled(Lion(), 3, ("lr", "betas"))
    hyper = scheduled.hyper(lr=[0.1, 0.2, 0.3], betas=(0.9, [0.9, 0.8, 0.7]), weight_decay=0.0)
    assert tree.map(lambda x: x.tolist(), hyper.betas) == ([0.9] * 3, [0.9, 0.8, 0.7])
    problem, (training, *_) = prepared(Defaults(), {"lr": 0.1}, generator)
    assert training.init_meta(problem.params, lr=0.1).hyper.alpha == 0.99


def test_a_state_of_it_is_read_as_data_and_copied(generator):
    _, (training, _, meta, carry, batches) = prepared(*OWN["lion"], generator=generator)
    online = Online(training, Adam(), ("lr",))
    state, _ = online.step(online.init_meta(meta, lr=0.1), online.init(meta, carry), batches[0])
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded.meta.hyper) is type(state.meta.hyper)
    assert_same_bits(loaded, state)
    assert_same_bits(copy.deepcopy(state), state)


def test_it_moves_what_fop_learns(generator):
    weight = torch.nn.Parameter(torch.randn(3, 3, generator=generator))

    class Descent:
        domains = {"lr": Positive()}  # noqa: RUF012

        def init(self, params):
            return ()

        def update(self, hyper, params, opt, direction):
            return {k: p - hyper.lr * direction[k] for k, p in params.items()}, ()

    ends = []
    for meta_optimizer in (cast(Any, Descent()), SGD()):
        p = torch.nn.Parameter(weight.detach().clone())
        fop = FOP([p], lr=0.1, meta_optimizer=meta_optimizer, preconditioner=Dense(), interval=1)
        for _ in range(3):
            p.grad = 2 * p.detach()
            fop.step()
        ends.append(p.detach())
    assert_same_bits(*ends)


class Unguarded(RMSprop):
    """RMSprop whose root has an infinite derivative where a gradient is zero."""

    def update(self, hyper, params, opt, direction):
        square = {k: hyper.alpha * opt[k] + (1 - hyper.alpha) * d**2 for k, d in direction.items()}
        new = {k: p - hyper.lr * direction[k] / (square[k].sqrt() + hyper.eps) for k, p in params.items()}
        return new, square


def test_a_root_at_zero_is_told_from_a_derivative_that_explodes():
    loss = functional.plain(lambda params, batch: (params["w"] * batch).square().sum())
    notes = {}
    for optimizer in (Unguarded(), RMSprop()):
        training, params = Training(loss, optimizer), {"w": torch.ones(2)}
        estimate = adjoint(
            training,
            lambda carry: carry.params["w"].sum(),
            training.init_meta(params, lr=0.1, alpha=0.9, eps=1e-3),
            training.init(params),
            4 * [torch.tensor([1.0, 0.0])],
        )
        notes[type(optimizer)] = estimate.info["notes"]
    assert "not a number" in notes[Unguarded][0]
    assert "such as a root at zero" in notes[Unguarded][0]
    assert notes[RMSprop] == ()


class Lars(RMSprop):
    """A rule that takes a number out of tensors."""

    def update(self, hyper, params, opt, direction):
        ratio = float(params["w"].norm() / direction["w"].norm())
        return {k: p - hyper.lr * ratio * direction[k] for k, p in params.items()}, opt


class InPlace(RMSprop):
    def update(self, hyper, params, opt, direction):
        for k, p in params.items():
            p.sub_(hyper.lr * direction[k])
        return params, opt


class ParamsAlone(RMSprop):
    def update(self, hyper, params, opt, direction) -> Any:
        return {k: p - hyper.lr * direction[k] for k, p in params.items()}


VALUES = {"lr": 0.1, "alpha": 0.9, "eps": 1e-3}


@every(
    "rule, lr, words",
    {
        "a number taken out": (Lars(), 0.1, ["Lars()", "number out of a tensor", "Compute with tensors"]),
        "in place": (InPlace(), 0.1, ["InPlace()", "writes in"]),
        "no state": (ParamsAlone(), 0.1, ["ParamsAlone()", "(params, opt)", "dict"]),
        "a pattern for a number": (
            Unguarded(),
            {"*": 0.1},
            ["Unguarded()", "dict by pattern", "at(hyper.lr, name)"],
        ),
    },
)
def test_an_update_that_cannot_be_differentiated_is_refused(rule, lr, words):
    loss = functional.plain(lambda params, batch: params["w"].square().sum())
    training, params = Training(loss, rule), {"w": torch.ones(2)}
    meta = training.init_meta(params, None, **(VALUES | {"lr": lr}))
    with pytest.raises((NotImplementedError, TypeError, ValueError)) as caught:
        adjoint(training, lambda carry: carry.params["w"].sum(), meta, training.init(params), 3 * [None])
    assert [word for word in words if word not in str(caught.value)] == []


def test_verify_finds_a_number_that_a_preconditioner_takes_out_of_its_gradient():
    class Clipped:
        def init(self, param, generator=None):
            return torch.ones(())

        def apply(self, m, grad):
            return m * grad / max(grad.norm().item(), 1e-3)

        def pullback(self, m, grad, cotangent):
            return tree.pull(lambda m: self.apply(m, grad), m, cotangent)

    report = verify.check(preconditioner=Clipped())
    assert [row.part for row in report.rows if not row.ok] == ["loss.weights", "loss.l2", "gradient"]


class NoUpdate:
    domains = {"lr": Positive()}  # noqa: RUF012

    def init(self, params):
        return ()


class HalfCredit(RMSprop):
    def credit(self, hyper, memory, grads):
        return (), ()


REFUSED = {
    "no update": (lambda: Training(_loss, cast(Any, NoUpdate())), ["NoUpdate", "without update"]),
    "some of credit": (lambda: Training(_loss, HalfCredit()), ["init_memory, toward", "all three, or none"]),
    "a value that is left out": (
        lambda: Training(_loss, RMSprop()).init_meta({"w": torch.ones(2)}, lr=0.1),
        ["alpha, eps", "got lr", "alpha=..., eps=..."],
    ),
    "an unknown value": (
        lambda: Training(_loss, RMSprop()).init_meta({"w": torch.ones(2)}, lr=0.1, momentum=0.9),
        ["lr, alpha, eps", "got momentum"],
    ),
}
_loss = functional.plain(lambda params, batch: params["w"].sum())


@every("act, words", REFUSED)
def test_what_is_missing_is_named(act, words):
    with pytest.raises(TypeError) as caught:
        act()
    assert [word for word in words if word not in str(caught.value)] == []


PATTERNS = {"0.*": 0.05, "*.weight": 0.1, "*": 0.2}


@every("optimizer", {"sgd": SGD(), "momentum": Momentum(), "adam": Adam(), "own": RMSprop()})
def test_a_rate_by_pattern_is_that_rate_for_each_and_its_derivative_their_sum(optimizer, generator):
    others: dict[str, Any] = {"alpha": 0.9, "eps": 1e-3} if isinstance(optimizer, RMSprop) else {}
    problem, (training, outer_loss, _, carry, batches) = prepared(optimizer, {"lr": 0.1} | others, generator)
    fits = {
        k: "0.*" if k.startswith("0.") else "*.weight" if k.endswith("weight") else "*"
        for k in problem.params
    }
    estimates = [
        adjoint(training, outer_loss, training.init_meta(problem.params, lr=lr, **others), carry, batches)
        for lr in (PATTERNS, {k: PATTERNS[pattern] for k, pattern in fits.items()})
    ]
    assert_same_bits(estimates[0].carry, estimates[1].carry)
    by_pattern, by_name = (estimate.grads.hyper.lr for estimate in estimates)
    for pattern, d in by_pattern.items():
        assert_near(d, sum(x for k, x in by_name.items() if fits[k] == pattern), rtol=1e-12)


def test_online_learns_a_rate_for_each_pattern_in_its_own_units(generator):
    problem, (training, _, _, carry, batches) = prepared(Momentum(), {"lr": 0.1}, generator)
    online = Online(training, SGD(), ("lr",))
    ends = []
    for scale in (1.0, 1e3):  # of the loss: what is scale-free does not see it
        scaled = Training(functional.plain(lambda p, b, s=scale: s * problem.loss(p, {}, b)[0]), Momentum())
        meta = scaled.init_meta(problem.params, lr={k: x / scale for k, x in PATTERNS.items()})
        online = Online(scaled, SGD(), ("lr",))
        outer_meta, state = online.init_meta(meta, lr=0.1), online.init(meta, carry)
        for batch in batches:
            state, _ = online.step(outer_meta, state, batch)
        ends.append({k: x * scale for k, x in state.meta.hyper.lr.items()})
        assert len({float(x / PATTERNS[k]) for k, x in ends[-1].items()}) == len(PATTERNS)
    assert_near(ends[1], ends[0], rtol=1e-9)


def test_a_compiled_step_with_patterns_is_the_eager_one(generator):
    problem, (training, *_) = prepared(Momentum(), {"lr": 0.1}, generator)
    meta, carry = training.init_meta(problem.params, lr=PATTERNS), training.init(problem.params)
    torch.compiler.reset()  # it gives up on code that other tests had it build often
    step = torch.compile(training.step, fullgraph=True, backend="aot_eager")
    assert_near(
        step(meta, carry, problem.batches[0]), training.step(meta, carry, problem.batches[0]), rtol=1e-14
    )
