"""Estimators, and derivatives that any library computes, are held against differences of whole runs."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from problems import batch_loss, every, mlp

from metafop import SGD, Adam, LowRank, Online, Training, functional, tree, verify
from metafop.hypergradients import (
    ConjugateGradients,
    Forward,
    Implicit,
    Truncated,
    adjoint,
    forward,
    implicit,
    reversible,
)
from metafop.verify import Problem, check_estimator, check_hypergradient

HYPER = {"hyper.lr", "hyper.momentum", "hyper.weight_decay"}
PRECOND, LOSS, START = {"precond.w", "precond.b"}, {"loss.weights", "loss.l2"}, {"start.w", "start.b"}


@every(
    "estimator, parts",
    {
        "adjoint": (adjoint, HYPER | PRECOND | LOSS | START),
        "reversible": (reversible, HYPER | PRECOND | LOSS | START),
        "forward": (forward, HYPER | PRECOND | LOSS),
        "forward, of the start and lr": (Forward(("start", "lr")), {"hyper.lr"} | START),
        "implicit": (implicit, LOSS),
    },
)
def test_an_estimator_passes_in_every_part_that_it_finds(estimator, parts):
    for seed in (1, 2):
        report = check_estimator(estimator, seed=seed)
        assert report.ok, report
        assert {row.part for row in report.rows} == parts


@dataclass(frozen=True)
class Off:
    """A user's estimator, the adjoint but for one number of the start."""

    by: float = 1e-5

    def __call__(self, training, outer_loss, meta, carry, batches):
        estimate = adjoint(training, outer_loss, meta, carry, batches)
        start = estimate.start.params
        start = start | {"w": start["w"] + self.by * torch.eye(2, 3, dtype=torch.float64) * start["w"]}
        return estimate._replace(start=estimate.start._replace(params=start))


def test_an_estimator_of_a_users_own_that_is_off_in_a_number_is_found():
    report = check_estimator(Off(), verify.several_steps(SGD(), LowRank(1), lr=0.2))
    assert [row.part for row in report.rows if not row.ok] == ["start.w"]
    assert report.worst.worst_at in ("start.w[0, 0]", "start.w[1, 1]")
    assert report.worst.what == "Off(), SGD()"
    assert check_estimator(Off(by=1e-13)).ok


def test_what_truncation_leaves_out_is_found():
    assert not check_estimator(Truncated(2)).ok
    assert check_estimator(Truncated(5)).ok


def test_parts_are_named_by_their_start_and_what_is_not_found_is_refused():
    report = check_estimator(adjoint, parts=("loss.l2", "start.b"))
    assert [row.part for row in report.rows] == ["loss.l2", "start.b"]
    with pytest.raises(ValueError, match=r"^Implicit\(\), SGD\(\) finds no derivative .* \('hyper',\)"):
        check_estimator(implicit, parts=("hyper",))
    with pytest.raises(TypeError, match="takes an estimator itself, got its name 'adjoint'"):
        check_estimator("adjoint")  # pyright: ignore[reportArgumentType]


def test_an_estimator_is_checked_on_a_problem_of_ones_own(generator):
    problem = mlp(generator)
    training = problem.training(Adam())

    def outer_loss(carry):
        return problem.loss(carry.params, carry.buffers, problem.batches[4])[0]

    meta = training.init_meta(problem.params, lr=0.1, eps=1e-2)
    carry = training.init(problem.params, problem.buffers)
    own = Problem(training, outer_loss, meta, carry, problem.batches[:4])
    report = check_estimator(adjoint, own, numbers=3, directions=2)
    assert report.ok, report
    assert {row.part: row.compared for row in report.rows}["start.0.weight"] == "3 of 12, 2 directions"


def test_a_run_that_learns_its_own_meta_passes_too():
    training, outer_loss, meta, carry, batches = verify.several_steps(seed=3)
    online = Online(training, SGD(), learn=("lr", "precond"), guards=())
    state, outer_meta = online.init(meta, carry), online.init_meta(meta, lr=0.01)
    own = Problem(online, lambda state: outer_loss(state.carry, state.meta), outer_meta, state, batches)
    report = check_estimator(adjoint, own)
    assert report.ok, report
    assert report.worst.what == "Adjoint(), Online"


def ridge(generator):
    """Return least squares with a penalty, run to its minimum, and the outer loss there in closed form."""
    inputs, targets = torch.randn(2, 6, 3, generator=generator)
    held_out, wanted = torch.randn(2, 6, 3, generator=generator)

    def loss(params, batch, leaves):
        errors = (inputs @ params["w"] - leaves["targets"]).square()
        return (errors * leaves["weights"].exp()).sum() / 6 + leaves["l2"] * params["w"].square().sum()

    training = Training(functional.plain(loss), SGD())
    leaves = {"weights": 0.3 * targets[:, 0], "targets": targets[:, 1], "l2": 0.5}
    params = {"w": torch.zeros(3)}
    meta = training.init_meta(params, lr=0.2, loss=leaves)

    def outer(w):
        return (held_out @ w - wanted[:, 0]).square().sum()

    def at_minimum(leaves):
        weighted = inputs * leaves["weights"].exp()[:, None] / 6
        hessian = weighted.mT @ inputs + leaves["l2"] * torch.eye(3)
        return outer(torch.linalg.solve(hessian, weighted.mT @ leaves["targets"]))

    own = Problem(training, lambda carry: outer(carry.params["w"]), meta, training.init(params), 200 * [None])
    return own, at_minimum


def test_implicit_is_the_derivative_of_a_minimum_in_closed_form(generator):
    own, at_minimum = ridge(generator)
    estimator = Implicit(ConjugateGradients(iterations=3))
    report = check_estimator(estimator, own)
    assert report.ok, report
    found = tree.named(estimator(*own).grads.loss)
    expected = torch.func.grad(at_minimum)(own.meta.loss)

    def hypergradient(values):
        return {k: found[k] for k in values}

    assert check_hypergradient(hypergradient, at_minimum, own.meta.loss).ok
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_implicit_short_of_the_minimum_is_found(generator):
    own, _ = ridge(generator)
    assert not check_estimator(implicit, own._replace(batches=3 * [None])).ok


@dataclass
class Loop:
    """A training by hand: weighted least squares by steps of descent, whose values are learned."""

    calls: int = 0
    examples: int = 400
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self):
        self.inputs = torch.randn(self.examples, 3, generator=self.generator)
        self.targets = torch.randn(self.examples, generator=self.generator)
        weights = torch.randn(self.examples, generator=self.generator)
        self.at = {"weights": weights, "start": torch.zeros(3), "lr": 0.2, "unused": 1.0}

    def run(self, values):
        self.calls += 1
        w = values["start"]
        for _ in range(10):
            gaps = self.inputs @ w - self.targets
            w = w - values["lr"] * (values["weights"].exp() * gaps) @ self.inputs / self.examples
        return (self.inputs @ w).sin().square().sum()

    def hypergradient(self, values):
        leaves = [x.requires_grad_() for x in values.values()]
        found = torch.autograd.grad(self.run(values), leaves, materialize_grads=True)
        return dict(zip(values, found, strict=True))


def test_a_right_derivative_of_a_loop_by_hand_passes_by_few_runs():
    loop = Loop()
    report = check_hypergradient(loop.hypergradient, loop.run, loop.at)
    assert report.ok, report
    compared = {row.part: row.compared for row in report.rows}
    assert compared == {
        "weights": "12 of 400, 3 directions",
        "start": "3 of 3",
        "lr": "1 of 1",
        "unused": "1 of 1",
    }
    assert loop.calls < 10 * 20
    assert all(row.autograd is None and row.what == "hypergradient" for row in report.rows)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1.001, 0.0])
def test_one_wrong_number_in_a_large_leaf_is_found_and_located(wrong):
    loop = Loop()

    def hypergradient(values):
        found = loop.hypergradient(values)
        return found | {"weights": torch.where(torch.arange(400) == 137, wrong, 1.0) * found["weights"]}

    report = check_hypergradient(hypergradient, loop.run, loop.at, numbers=4)
    assert [row.part for row in report.rows if not row.ok] == ["weights"]
    assert report.worst.worst_at == "weights[137]"


@pytest.mark.parametrize(("by", "ok"), [(1 + 1e-8, True), (1 + 1e-5, False), (-1.0, False), (0.0, False)])
def test_a_derivative_that_is_off_by_a_factor_is_found(by, ok):
    loop = Loop(examples=9)

    def hypergradient(values):
        return tree.scale(loop.hypergradient(values), by)

    assert check_hypergradient(hypergradient, loop.run, loop.at).ok == ok


def test_a_run_that_writes_into_its_values_harms_nothing():
    def run(values):
        return values["x"].mul_(2.0).square().sum()

    assert check_hypergradient(lambda values: {"x": 8 * values["x"]}, run, {"x": torch.ones(2)}).ok


def test_a_run_in_numpy_passes():
    np = pytest.importorskip("numpy")
    inputs = np.linspace(-1, 2, 12).reshape(4, 3)

    def run(values):
        w, l2 = np.zeros(3), values["l2"].numpy()
        for _ in range(5):
            w = w - 0.1 * (inputs.T @ (inputs @ w - 1) + l2 * w)
        return (w**2).sum()

    def hypergradient(values):
        w, d, l2 = np.zeros(3), np.zeros((3, 3)), values["l2"].numpy()
        for _ in range(5):
            d = d - 0.1 * (inputs.T @ inputs @ d + np.diag(l2) @ d + np.diag(w))
            w = w - 0.1 * (inputs.T @ (inputs @ w - 1) + l2 * w)
        return {"l2": 2 * w @ d}

    report = check_hypergradient(hypergradient, run, {"l2": np.array([0.1, 0.2, 0.3])})
    assert report.ok, report


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # higher's: why it is wrong
def test_highers_derivatives_pass_but_that_in_adams_second_beta(generator):
    higher = pytest.importorskip("higher")
    problem = mlp(generator)

    def unrolled(values):
        optimizer = torch.optim.Adam(problem.model.parameters(), lr=0.1, eps=1e-3)
        override = {"lr": [values["lr"]], "betas": [(values["beta1"], values["beta2"])]}
        with higher.innerloop_ctx(problem.model, optimizer, override=override) as (model, differentiable):
            for batch in problem.batches[:4]:
                differentiable.step(batch_loss(model, batch))
            return batch_loss(model, problem.batches[4])

    def hypergradient(values):
        value = unrolled({k: x.requires_grad_() for k, x in values.items()})
        return dict(zip(values, torch.autograd.grad(value, list(values.values())), strict=True))

    report = check_hypergradient(hypergradient, unrolled, {"lr": 0.05, "beta1": 0.7, "beta2": 0.9})
    assert [row.part for row in report.rows if not row.ok] == ["beta2"]


class Array:
    """An array as other libraries have them: it can be handed on, and not written into."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **kwargs):
        return self.x.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def test_arrays_of_any_library_do():
    np = pytest.importorskip("numpy")
    fixed = np.ones(2)
    fixed.setflags(write=False)
    for ones in (
        Array(torch.ones(2)),
        Array(torch.ones(2, dtype=torch.float32)),
        np.ones(2),
        fixed,
        [1.0, 1.0],
    ):
        assert check_hypergradient(lambda values, ones=ones: {"x": ones}, half_square, {"x": ones}).ok


def half_square(values):
    return (values["x"] ** 2).sum() / 2


def quadratic(values):
    return (values["x"] ** 2).sum()


def doubled(values):
    return {"x": 2 * values["x"]}


draws = iter(range(2))


@every(
    "changed, error, sentence",
    {
        "no values": ({"at": {}}, TypeError, r"at values by name, got \{\}\. Pass such as"),
        "no dict": ({"at": torch.ones(2)}, TypeError, "at values by name, got tensor"),
        "a word": ({"at": {"x": "1"}}, TypeError, "the value of 'x' is a str"),
        "complex": ({"at": {"x": torch.ones(2) * 1j}}, TypeError, "'x' is a Tensor, of which no real"),
        "NaN": ({"at": {"x": math.nan}}, ValueError, "'x' is nan, which is not finite"),
        "no numbers": ({"at": {"x": torch.ones(0)}}, ValueError, "The value of 'x' is"),
        "a missing name": (
            {"hypergradient": lambda values: {}},
            ValueError,
            r"returns derivatives in \[\], but the values are \['x'\]\. Return one for each",
        ),
        "another name": (
            {"hypergradient": lambda values: {"x": 1.0, "y": 1.0}},
            ValueError,
            r"in \['x', 'y'\], but",
        ),
        "no names": ({"hypergradient": lambda values: 2.0}, TypeError, "by name, got a float. Return a dict"),
        "None": ({"hypergradient": lambda values: {"x": None}}, TypeError, "for 'x' is a NoneType"),
        "a shape": (
            {"hypergradient": lambda values: {"x": values["x"].sum()}},
            ValueError,
            r"of shape \(\) for 'x', of shape \(2,\)\. Return",
        ),
        "a vector": (
            {"run": lambda values: values["x"]},
            ValueError,
            r"returns a scalar, got one of shape \(2,\)\. Take",
        ),
        "no number": ({"run": lambda values: None}, TypeError, "returns a number, got a NoneType"),
        "a run that is not finite": ({"run": lambda values: math.nan}, ValueError, "The run gives nan"),
        "a run that draws": (
            {"run": lambda values: quadratic(values) + next(draws)},
            ValueError,
            r"The run gives 2\.0 and then 3\.0 for the same values\. Seed",
        ),
        "a run in single precision": (
            {"run": lambda values: quadratic({"x": values["x"].float()}).sin() / math.cos(2)},
            ValueError,
            r"cannot be checked in 'x': by differences .* Compute in float64",
        ),
        "a run with an edge": (
            {"run": lambda values: values["x"].sum() if values["x"].max() == 1 else torch.nan},
            ValueError,
            "next to its value the run is not finite",
        ),
    },
)
def test_what_cannot_be_checked_is_refused_in_a_sentence(changed, error, sentence):
    given: dict[str, Any] = {"hypergradient": doubled, "run": quadratic, "at": {"x": torch.ones(2)}} | changed
    with pytest.raises(error, match=sentence) as caught:
        check_hypergradient(**given)
    assert "\n" not in str(caught.value)
