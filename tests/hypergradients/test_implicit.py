"""Implicit differentiation: against closed forms, dense Hessians written by hand, and runs to their end."""

from typing import Any

import pytest
import torch
from problems import assert_near, assert_same_bits, every
from torch import nn
from torch.func import grad, hessian, jacrev, vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from metafop import Adam, Identity, Momentum, Online, Scheduled, Tasks, Training, Unrolled, functional, tree
from metafop.diagnostics import AtMinimum, Solved
from metafop.hypergradients import ConjugateGradients, Implicit, Neumann, adjoint, implicit
from metafop.optimizers import Positive

SOLVERS = {
    "cg": ConjugateGradients(),
    "cg, preconditioned": ConjugateGradients(probes=8),
    "neumann": Neumann(1000),
}
N, D = 30, 6


@pytest.fixture
def data(generator):
    """Inputs and targets to train on, and others."""
    return tuple(torch.randn(N, *shape, generator=generator) for shape in ((D,), (), (D,), ()))


def squares(params, batch, leaves):
    inputs, targets = batch
    errors = leaves["weights"] * (inputs @ params["w"] - targets - leaves["shift"]).square()
    return errors.mean() + (leaves["l2"] * params["w"].square()).sum()


def ridge(data):
    """Return the run of a weighted ridge regression, and the outer loss at its minimum in closed form."""
    inputs, targets, others, labels = data
    training = Training(functional.plain(squares), Momentum(), loss_domains={"l2": Positive()})
    params = {"w": torch.zeros(D)}
    leaves = {
        "weights": torch.linspace(0.5, 1.5, N),
        "shift": torch.tensor(0.2),
        "l2": torch.linspace(0.1, 0.4, D),
    }
    meta = training.init_meta(params, lr=0.15, momentum=0.7, loss=leaves)

    def outer(carry):
        return (others @ carry.params["w"] - labels).square().mean()

    def closed(leaves):
        a = inputs.T @ (leaves["weights"][:, None] * inputs) / N + leaves["l2"].diag()
        w = torch.linalg.solve(a, inputs.T @ (leaves["weights"] * (targets + leaves["shift"])) / N)
        return (others @ w - labels).square().mean()

    return (training, outer, meta, training.init(params), 200 * [(inputs, targets)]), closed


@every("solver", SOLVERS)
def test_ridge_regression_has_its_closed_form(solver, data):
    problem, closed = ridge(data)
    estimate = Implicit(solver)(*problem)
    assert_near(estimate.grads.loss, grad(closed)(problem[2].loss), rtol=1e-10)
    assert_near(estimate.value, closed(problem[2].loss), rtol=1e-12)
    assert estimate.info["residual"] < 1e-12
    assert estimate.info["distance"] < 1e-10
    assert not estimate.info["negative_curvature"]


@every("solver", SOLVERS)
def test_logistic_regression_has_the_derivative_of_the_dense_equation(solver, data):
    inputs, targets, others, labels = data
    truth, judged = (targets > 0).double(), (labels > 0).double()

    def plain(w, l2):
        return binary_cross_entropy_with_logits(inputs @ w, truth) + (l2 * w.square()).sum()

    def end(w):
        return binary_cross_entropy_with_logits(others @ w, judged)

    training = Training(functional.plain(lambda params, _, l2: plain(params["w"], l2)), Momentum())
    params, l2 = {"w": torch.zeros(D)}, torch.linspace(0.02, 0.1, D)
    meta = training.init_meta(params, lr=3.0, momentum=0.7, loss=l2)
    estimate = Implicit(solver)(
        training, lambda carry: end(carry.params["w"]), meta, training.init(params), 250 * [None]
    )
    w = estimate.carry.params["w"]
    x = torch.linalg.solve(hessian(plain)(w, l2), grad(end)(w))
    assert_near(estimate.grads.loss, -jacrev(grad(plain), argnums=1)(w, l2).T @ x, rtol=1e-10)


def test_it_is_what_the_derivative_through_the_run_tends_to(data):
    problem, _ = ridge(data)
    assert_near(implicit(*problem).grads.loss, adjoint(*problem).grads.loss, rtol=1e-9)


def test_a_run_that_is_at_its_minimum_needs_one_step(data):
    (training, outer, meta, carry, batches), closed = ridge(data)
    end = implicit(training, outer, meta, carry, batches).carry
    assert_near(
        implicit(training, outer, meta, end, batches[:1]).grads.loss, grad(closed)(meta.loss), rtol=1e-10
    )


def test_the_minimum_is_that_of_the_mean_over_batches_each_as_often_as_it_is_given(data):
    (training, outer, meta, carry, _), closed = ridge(data)
    inputs, targets = data[:2]
    leaves = meta.loss | {"weights": torch.ones(())}
    meta = meta._replace(loss=leaves)
    end = implicit(training, outer, meta, carry, 200 * [(inputs, targets)]).carry
    thirds = [(inputs[i : i + 10], targets[i : i + 10]) for i in (0, 10, 20)]

    class Cut:
        """The same thirds, each time as other objects."""

        def __len__(self):
            return 3

        def __getitem__(self, t):
            return tuple(x.clone() for x in thirds[t])

    still = meta._replace(hyper=meta.hyper._replace(lr=torch.tensor(0.0)))
    expected = grad(lambda x: closed(leaves | x | {"weights": torch.ones(N)}))(
        {k: leaves[k] for k in ("l2", "shift")}
    )
    for batches in (thirds, [thirds[0], thirds[1], thirds[0], thirds[2], thirds[1], thirds[2]], Cut()):
        found = implicit(training, outer, still, end, batches).grads.loss
        assert_near({k: found[k] for k in expected}, expected, rtol=1e-9)


def test_an_outer_loss_may_read_the_leaves_too(data):
    (training, outer, meta, carry, batches), closed = ridge(data)
    estimate = implicit(
        training, lambda carry, meta: outer(carry) + meta.loss["l2"].sum() ** 2, meta, carry, batches
    )
    expected = grad(lambda leaves: closed(leaves) + leaves["l2"].sum() ** 2)(meta.loss)
    assert_near(estimate.grads.loss, expected, rtol=1e-10)


def test_damping_is_added_to_the_hessian(data):
    (training, outer, meta, carry, batches), _ = ridge(data)
    estimate = Implicit(damping=0.5)(training, outer, meta, carry, batches)
    w, (inputs, targets) = estimate.carry.params["w"], data[:2]

    def plain(w, leaves):
        return squares({"w": w}, (inputs, targets), leaves)

    h = hessian(plain)(w, meta.loss) + 0.5 * torch.eye(D)
    x = torch.linalg.solve(h, grad(lambda w: outer(estimate.carry._replace(params={"w": w})))(w))
    expected = tree.map(lambda j: -x @ j.reshape(D, -1), jacrev(grad(plain), argnums=1)(w, meta.loss))
    assert_near(
        estimate.grads.loss, tree.map(lambda e, like: e.view_as(like), expected, meta.loss), rtol=1e-9
    )


def test_inside_vmap_it_is_the_same_for_each(data):
    (training, outer, meta, carry, batches), closed = ridge(data)
    penalties = torch.stack([meta.loss["l2"], 2 * meta.loss["l2"]])

    def one(l2):
        here = meta._replace(loss=meta.loss | {"l2": l2})
        return implicit(training, outer, here, carry, batches).grads.loss["l2"]

    expected = [grad(lambda l2: closed(meta.loss | {"l2": l2}))(l2) for l2 in penalties]
    assert_near(vmap(one)(penalties), torch.stack(expected), rtol=1e-9)


def test_unrolled_learns_penalties_by_it(data):
    (training, outer, meta, carry, batches), closed = ridge(data)
    trust = (Solved(1e-6), AtMinimum(1e-3))
    learner = Unrolled(training, Adam(), learn=("loss.l2",), estimator=implicit, trust=trust)
    outer_meta, state = learner.init_meta(meta, lr=0.1), learner.init(meta)
    for _ in range(5):
        state, info = learner.step(outer_meta, state, outer, carry, batches)
        assert info["moved"]
        assert info["trust/residual"] < 1e-6
        assert info["trust/distance"] < 1e-3
        carry = state.carry
    assert closed(state.meta.loss) < closed(meta.loss)


def test_nothing_is_learned_far_from_a_minimum_if_that_is_asked(data):
    (training, outer, meta, carry, batches), _ = ridge(data)
    learner = Unrolled(training, Adam(), learn=("loss.l2",), estimator=implicit, trust=(AtMinimum(1e-3),))
    state, info = learner.step(learner.init_meta(meta, lr=0.1), learner.init(meta), outer, carry, batches[:3])
    assert not info["moved"]
    assert_same_bits(state.meta, meta)
    assert "AtMinimum(at_most=0.001) asks for at most 0.001" in info["notes"][-1]


def test_a_leaf_with_a_schedule_has_its_derivative_at_the_entry_of_the_end(data):
    (_, outer, meta, carry, batches), closed = ridge(data)
    training = Training(functional.plain(squares), Scheduled(Momentum(), 3, ("loss.l2",)))
    leaves = meta.loss | {"l2": meta.loss["l2"].expand(3, D)}
    timed = training.init_meta(carry.params, lr=0.15, momentum=0.7, loss=leaves)
    found = implicit(training, outer, timed, training.init(carry.params), batches).grads.loss["l2"]
    expected = torch.stack([torch.zeros(D), torch.zeros(D), grad(closed)(meta.loss)["l2"]])
    assert_near(found, expected, rtol=1e-9)


def test_a_network_at_a_minimum_has_the_derivative_of_the_dense_equation(generator):
    inputs, targets = torch.randn(20, 3, generator=generator), torch.randn(20, 1, generator=generator)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def fit(model, batch, l2):
        return (model(inputs) - targets).square().mean() + l2 * sum(
            p.square().sum() for p in model.parameters()
        )

    loss, params, _ = functional.from_module(model, fit)
    params = tree.map(lambda p: torch.randn(p.shape, generator=generator), params)
    training = Training(loss, Momentum())
    meta = training.init_meta(params, lr=0.2, momentum=0.9, loss=torch.tensor(0.02))
    others = torch.randn(10, 3, generator=generator)

    def end(params):
        return torch.func.functional_call(model, params, (others,)).square().mean()

    estimate = implicit(training, lambda carry: end(carry.params), meta, training.init(params), 1200 * [None])
    assert estimate.info["distance"] < 1e-8
    flat, rebuild = _flat(estimate.carry.params)

    def plain(flat, l2):
        return loss(rebuild(flat), {}, None, l2)[0]

    x = torch.linalg.solve(hessian(plain)(flat, meta.loss), grad(lambda flat: end(rebuild(flat)))(flat))
    expected = -x @ jacrev(grad(plain), argnums=1)(flat, meta.loss)
    assert_near(estimate.grads.loss, expected, rtol=1e-8)


def _flat(params):
    names, shapes = list(params), [p.shape for p in params.values()]

    def rebuild(flat):
        parts = flat.split([s.numel() for s in shapes])
        return {k: part.view(s) for k, part, s in zip(names, parts, shapes, strict=True)}

    return torch.cat([p.flatten() for p in params.values()]), rebuild


def test_negative_curvature_and_a_run_that_has_not_ended_are_noted():
    loss = functional.plain(lambda params, _, shift: (params["w"] + shift).cos().sum())
    training, params = Training(loss, Momentum()), {"w": torch.tensor([0.1, 3.0])}
    meta = training.init_meta(params, lr=0.0, loss=torch.tensor(0.0))
    info = implicit(training, lambda carry: carry.params["w"].sum(), meta, training.init(params), [None]).info
    assert info["negative_curvature"]
    assert any("The curvature was negative on the way" in note for note in info["notes"])
    assert any("has not ended at a minimum of its loss" in note for note in info["notes"])


def test_too_few_iterations_are_noted(data):
    problem, _ = ridge(data)
    info = Implicit(ConjugateGradients(iterations=1))(*problem).info
    assert info["iterations"] == 1
    assert any("left a residual of" in note and "Allow more" in note for note in info["notes"])


def test_what_overflows_is_said_once(data):
    (training, outer, meta, carry, batches), _ = ridge(data)
    wild = meta._replace(hyper=meta.hyper._replace(lr=torch.tensor(1e30)))
    notes = implicit(training, outer, wild, carry, batches[:20]).info["notes"]
    assert "overflowed" in notes[0]
    assert not any("residual" in note or "minimum of its loss" in note for note in notes)


def singular(solver):
    """A parameter that the loss of training does not curve in, and the outer loss depends on."""

    def loss(params, batch, leaves):
        return (leaves * params["w"][0] - 1).square() + 0 * params["w"].sum()

    training, params = Training(functional.plain(loss), Momentum()), {"w": torch.tensor([1.0, 0.5])}
    meta = training.init_meta(params, lr=0.1, loss=torch.tensor(1.0))
    return Implicit(solver)(
        training, lambda carry: carry.params["w"].sum(), meta, training.init(params), [None]
    )


@every("solver", SOLVERS)
def test_a_singular_hessian_is_refused(solver):
    with pytest.raises(ValueError, match=r"Hessian .* is singular: .* Penalize .*damping=1e-3"):
        singular(solver)


@every("seed", {str(seed): seed for seed in range(6)})
def test_whether_a_singular_equation_can_be_solved_is_never_mistaken(seed):
    rng = torch.Generator().manual_seed(seed)
    root = torch.randn(20, 4 + 2 * seed, generator=rng) * torch.logspace(0, -2, 4 + 2 * seed)
    a, b = root @ root.T, torch.randn(20, generator=rng)
    inside = ConjugateGradients()(lambda v: a @ v, a @ b)
    assert inside.residual < 1e-10
    assert not inside.singular
    outside = ConjugateGradients()(lambda v: a @ v, b)
    assert outside.residual > 1e-3
    assert outside.singular | outside.negative_curvature


def stopped(solver=SOLVERS["cg"]):
    loss = functional.plain(
        lambda params, _, l2: (params["w"] * params["w"].detach()).sum() * l2 - params["w"].sum()
    )
    training, params = Training(loss, Momentum()), {"w": torch.ones(2)}
    meta = training.init_meta(params, lr=0.1, momentum=0.0, loss=torch.tensor(1.0))
    return Implicit(solver)(
        training, lambda carry: carry.params["w"].sum(), meta, training.init(params), 400 * [None]
    )


def test_a_loss_that_stops_a_gradient_takes_a_solver_for_what_is_not_symmetric():
    # g = l2 w - 1: the run ends at w = 1 / l2
    assert_near(stopped(Neumann(500)).grads.loss, torch.tensor(-2.0), rtol=1e-9)


def refused(learn: Any = ("lr",), leaves: Any = 0.1, outer: Any = None, solver: Any = None, kind: Any = None):
    loss = functional.plain(
        lambda params, _, l2: (params["w"] - 1).square().sum() + l2 * params["w"].square().sum()
    )
    bare = functional.plain(lambda params, _: (params["w"] - 1).square().sum())
    training, params = Training(bare if leaves is None else loss, Momentum()), {"w": torch.zeros(2)}
    meta, carry = training.init_meta(params, lr=0.1, loss=leaves), training.init(params)
    if solver is not None:
        return Implicit(solver)
    if kind is not None:
        return implicit(kind(training), outer, meta, carry, [None])
    if outer is not None or leaves is None:
        return implicit(training, outer or (lambda carry: carry.params["w"].sum()), meta, carry, [None])
    return Unrolled(training, Adam(), learn=learn, estimator=implicit).init(meta)


REFUSED = {
    "to learn lr": (
        refused,
        "Implicit gives no derivative in 'lr': .* Learn leaves of the loss, or use adjoint",
    ),
    "no leaves": (lambda: refused(leaves=None), "meta has none: lr, momentum .* Pass some to init_meta"),
    "an outer loss of the velocity": (
        lambda: refused(outer=lambda carry: carry.opt["w"].sum() + carry.params["w"].sum()),
        "The outer loss depends on the optimizer's state",
    ),
    "no solver": (lambda: refused(solver="cg"), "linear solver, got 'cg'. Pass ConjugateGradients"),
    "a negative damping": (lambda: Implicit(damping=-1.0), r"damping of zero or more, got -1\.0"),
    "no iterations": (lambda: ConjugateGradients(iterations=0), "one iteration or more, got iterations=0"),
    "a tolerance of zero": (lambda: ConjugateGradients(tolerance=0.0), r"tolerance above zero, got 0\.0"),
    "negative probes": (lambda: ConjugateGradients(probes=-1), "zero or more, got -1"),
    "a rate of zero": (lambda: Neumann(rate=0.0), r"rate above zero, got 0\.0"),
    "an online learner": (
        lambda: refused(outer=len, kind=lambda training: Online(training, Adam(), ("lr",))),
        "minimum of one loss, got Online",
    ),
    "tasks": (lambda: refused(outer=len, kind=lambda training: Tasks(training, 2)), "one loss, got Tasks"),
    "a stopped gradient": (stopped, r"stops a gradient, .* Implicit\(solver=Neumann\(\)\)"),
}


@every("act, says", REFUSED)
def test_bad_input_gets_a_clear_sentence(act, says):
    with pytest.raises((ValueError, TypeError), match=says) as caught:
        act()
    assert "\n" not in str(caught.value)


def test_a_loss_that_comes_out_different_is_refused():
    calls = []

    def loss(params, batch, leaves):
        calls.append(None)
        return (params["w"] - leaves).square().sum() * (1 + 1e-6 * len(calls))

    training, params = Training(functional.plain(loss), Momentum(), {"w": Identity()}), {"w": torch.zeros(2)}
    meta = training.init_meta(params, lr=0.1, loss=torch.tensor(1.0))
    with pytest.raises(ArithmeticError, match="comes out different when the step is taken again"):
        implicit(training, lambda carry: carry.params["w"].sum(), meta, training.init(params), 3 * [None])
