"""`theory` writes what it says; the theorems fail as printed, and never as corrected."""

import json
from dataclasses import replace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.paper.theory import command, counterexamples, problems, theorem1, theorem2
from experiments.paper.theory.problems import FUNCTIONS, KINDS
from experiments.paper.theory.theorem2 import RULES, Learned
from metafop import Dense

LIMIT = 0.5


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theory")
    command.main(replace(command.PRESETS["smoke"], out=folder))
    return folder


def test_smoke_writes_what_it_says(out):
    summary = json.loads((out / "summary.json").read_text())
    assert json.loads((out / "config.json").read_text())["config"]["quadratics"] == 200
    assert summary["theorem1_definite_printed_fails_run"] > 0
    assert summary["theorem1_wide_proof_no_step_fails_worst"] > 0
    for kind in KINDS:
        assert (
            summary[f"theorem1_{kind}_printed_no_step_rises"]
            == summary[f"theorem1_{kind}_printed_no_step"]
            > 0
        )
        assert summary[f"theorem1_{kind}_corrected_fails_worst"] == 0
        assert summary[f"theorem1_{kind}_corrected_fails_run"] == 0
        assert summary[f"theorem1_{kind}_proof_fails_worst"] == 0
    assert [value for key, value in summary.items() if key.endswith("corrected_bound_broken")] == [0.0] * 6
    assert [value for key, value in summary.items() if key.endswith("_corrected_broken")] == [0.0] * 24
    assert summary["theorem2_log_cosh_rho0.1_printed_bound_broken"] > 0.5
    assert summary["theorem2_log_cosh_rho0.1_rescaled_gamma_near"] == 1.0
    assert (out / "theory.png").stat().st_size > 10_000
    tables = (out / "tables.md").read_text()
    assert "| corrected: fails along 30 steps | 0 of 200 | 0 of 200 | 0 of 200 |" in tables
    assert "| log cosh, ρ = 0.1, rescaled M | 100 % |" in tables
    assert "| f left after a step, P = 0.5 | 0.25 | 0.3906 | 0 | 0 |" in tables


def test_the_curves_of_the_figure_are_in_tensorboard(out):
    norm = EventAccumulator(str(out / "events" / "theorem2_norm")).Reload()
    assert len(norm.Tags()["scalars"]) == 3
    (name,) = (tag for tag in norm.Tags()["scalars"] if "of FOP" in tag)
    assert norm.Scalars(name)[-1].step == 100
    assert norm.Scalars(name)[-1].value == pytest.approx(2358.3, abs=0.1)
    assert len(EventAccumulator(str(out / "events" / "theorem1_failure")).Reload().Tags()["scalars"]) == 4


def test_the_counter_examples_of_theorem_1():
    found = counterexamples.theorem_1()
    assert found["scalar"][1:] == (0.25, 0.390625, 0.0, 0.0)
    assert found["proof"][1:] == pytest.approx((1.3, 4.0, 0.9, 0.81))
    assert found["semidefinite"][2:] == pytest.approx((1.0, 0.9**100, 0.9**200))
    assert found["changing"][2:] == pytest.approx((0.0834, 0.2888, 0.0834), abs=1e-4)
    assert found["lipschitz"][1:] == pytest.approx((-0.5, 0.8, -0.005, -0.01))


def test_the_counter_examples_of_theorem_2():
    found = counterexamples.theorem_2()
    assert found["orthogonal"][1:] == pytest.approx((1.0, 1.0404, 1.0816, 1.0404))
    assert found["norm"].printed == pytest.approx(2.98)
    assert found["norm"].happens == pytest.approx(2358.3, abs=0.1)
    assert found["norm"].corrected == pytest.approx(found["norm"].happens)  # where g = p = K it is attained
    assert found["not_pl"].happens == pytest.approx(5e-4, rel=1e-3)
    assert found["gamma"].happens > 100
    assert found["gamma"].then == pytest.approx(0.1, rel=1e-4)
    assert found["diverges"].happens > 1e100
    assert found["diverges"].then < 1e-8


def test_the_quadratics_are_those_of_the_errata(generator):
    drawn, p = (problems.spectral(4000, 4, low, 1.0, generator) for low in (0.1, 0.2))
    claim = theorem1.claims(drawn, p.curvature)["printed"]
    fails = theorem1.worst(drawn, p.factor, claim.step) > claim.rate + 1e-12
    assert (claim.step <= 0).sum() == 2044
    assert (fails & (claim.step > 0)).sum() == 854


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_theorem_1_never_fails_as_corrected_and_does_as_printed(kind, seed):
    config = command.Config(quadratics=200, steps=60, dimension=2 + seed)
    found = command.descend(config, KINDS[kind], torch.Generator().manual_seed(seed))
    everywhere = torch.ones_like(found.usable)
    assert found.fails("corrected", everywhere) == {"worst": 0, "run": 0}
    assert found.fails("proof", found.usable) == {"worst": 0, "run": 0}
    if kind == "wide":  # where ρ > 0 is rare; and where ρ < 0, the proof turns an inequality round
        assert found.fails("proof", ~found.usable)["worst"] > 0
    else:
        assert found.fails("printed", found.usable)["worst"] > 0
    # Where it is a step at all, the printed one descends; it is the rate that fails.
    assert (found.worst["printed"][found.usable] < 1).all()


def test_the_worst_start_is_the_worst(generator):
    drawn = problems.spectral(20, 4, 0.1, 1.0, generator, singular=True)
    p = problems.spectral(20, 4, 0.2, 1.0, generator)
    step = 1 / p.curvature.amax(1)
    worst = theorem1.worst(drawn, p.factor, step)
    hessian = drawn.factor @ drawn.factor.mT
    by_hand = torch.linalg.eigvals(p.factor @ p.factor.mT @ hessian).real  # (20, 4)
    left = (1 - step[:, None] * by_hand).square().where(by_hand > 1e-9, 0.0).amax(1)
    torch.testing.assert_close(worst, left)
    start = torch.randn(20, 4, generator=generator)
    values = theorem1.descend(drawn, p.factor, step, start, 5)
    assert (values[1:] <= (worst + 1e-12) * values[:-1]).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("seed", [1, 2])
def test_theorem_2_never_fails_as_corrected(rule, name, seed):
    generator = torch.Generator().manual_seed(seed)
    function, box = FUNCTIONS[name]
    drawn = problems.mixed(30, 3, generator)
    start, rho = box * (2 * torch.rand(30, 3, generator=generator) - 1), torch.logspace(-2, 0.5, 30)
    found = theorem2.follow(RULES[rule], function, drawn, start, rho, LIMIT, 40)
    learned = Learned(found, found.slope.amax(0), rho)
    assert not theorem2.breaks_corrected(rule, learned, LIMIT).any()
    if rule == "plain":
        assert (found.log_norm > theorem2.bounds(learned).middle + 1e-9).any()


def test_what_holds_is_broken_by_a_run_of_another_rule():
    raw = counterexamples.on_a_line("raw", 10.0, 1.5, steps=200, limit=0.1)
    learned = Learned(raw, torch.ones(1), torch.full((1,), 1.5))
    assert not theorem2.breaks_corrected("raw", learned, 0.1).any()
    assert theorem2.breaks_corrected("rescaled", learned, 0.1).all()


@pytest.mark.parametrize("time", [1, 3, 1000])
def test_both_rescalings_give_p_the_norm_gamma(time, generator):
    m = torch.randn(4, 4, generator=generator)
    gamma = theorem2.norm(m) / time**2 + (1 - time**-2) * LIMIT
    held = theorem2.RescaledInStep(LIMIT, time).apply(m, torch.eye(4))
    torch.testing.assert_close(torch.linalg.matrix_norm(held, 2), gamma)
    kept = theorem2.scale(m, LIMIT, time).sqrt() * m
    torch.testing.assert_close(Dense().matrix(kept), held)


def test_one_dimension_is_refused():
    with pytest.raises(ValueError, match=r"dimension=1 .* Pass 2 or more"):
        command.Config(dimension=1)
