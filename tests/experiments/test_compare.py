"""`compare` runs from its command, and what it compares is what it says."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.__main__ import main
from experiments.studies.compare import horizons, methods, noisy_quadratic, training_curves
from experiments.studies.compare.digits import digits

SMALL = {
    "hidden": "4",
    "rounds": "1",
    "horizons.lrs": "0.05",
    "horizons.points": "0 3",
    "horizons.steps": "1 2",
    "horizons.networks": "2",
    "horizons.batch": "8",
    "quadratic.dimensions": "3",
    "quadratic.horizons": "1 3",
    "quadratic.samples": "4",
    "curves.lrs": "0.01 0.1",
    "curves.meta-lrs": "0.03",
    "curves.meta-steps": "2",
    "curves.horizon": "3",
    "curves.together": "2",
    "curves.tuning": "2",
    "curves.fresh": "2",
    "curves.steps": "10",
    "curves.batch": "8",
}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    flags = [word for flag, values in SMALL.items() for word in (f"--{flag}", *values.split())]
    main(["compare", "--out", str(folder), *flags])
    return folder


def test_compare_writes_what_it_says(out):
    summary = json.loads((out / "summary.json").read_text())
    assert summary["lr_one_step_cosine_lr0.05_step3_t1"] == 1.0
    assert summary["m_summed_cosine_lr0.05_step0_t2"] > 0
    assert summary["t1_relative_error"] < 1e-10
    assert summary["gradients_before_unrolled"] == 3 * 2 * 2 * 3
    assert {f"final_loss_{name}" for name in training_curves.STYLES} <= summary.keys()
    assert all((out / f"{name}.png").stat().st_size > 10_000 for name in ("horizons", "quadratic", "curves"))
    tables = (out / "tables.md").read_text()
    assert "| 3, 2 |" in tables
    assert "- T = 1 is the online rule" in tables
    events = EventAccumulator(str(out)).Reload()
    assert events.Scalars("test/online: lr")[-1].step == 9
    assert len(EventAccumulator(str(out / "unrolled")).Reload().Scalars("value")) == 2


def test_one_step_is_the_derivative_through_one_step(generator):
    settings = horizons.Horizons(lrs=(0.05, 0.3), points=(0, 5), steps=(1, 2), networks=2, batch=8)
    agreement = horizons.measure(settings, digits(4, 2, seed=0), generator, lambda what: None)
    assert agreement.cosines.shape == (4, 2, 2, 2, 2, 2)
    assert agreement.error < 1e-10
    torch.testing.assert_close(agreement.mean("M", "one step")[..., 0], torch.ones(2, 2))
    # At rest the velocity is zero, and so is the derivative of the first step in momentum.
    assert agreement.mean("momentum", "one step")[:, 0].eq(0).all()


def test_the_quadratics_hypergradients_have_the_expectation_in_closed_form(generator):
    settings = noisy_quadratic.Quadratic(dimensions=5, horizons=(1, 4, 16), samples=4000)
    for name, found in noisy_quadratic.measure(settings, generator, lambda what: None).items():
        expected = found.expected[torch.tensor(settings.horizons) - 1]
        assert ((found.means - expected).abs() < 4 * found.errors).all(), name


def test_a_longer_horizon_changes_the_sign_in_either_direction():
    found = noisy_quadratic.measure(
        noisy_quadratic.Quadratic(samples=2), torch.Generator().manual_seed(0), lambda what: None
    )
    assert found["start"].expected[0] < 0 < found["start"].expected[-1]
    assert found["middle"].expected[0] > 0 > found["middle"].expected[-1]
    assert {name: slopes.flip for name, slopes in found.items()} == {"start": 4, "middle": 7}


def test_many_networks_under_one_loss_move_as_if_alone(generator):
    data = digits(4, 2, seed=0)
    task = methods.Networks(data, networks=2, together=2, horizon=3, batch=8, seed=0)
    training, both = task.training, task.start(0)
    meta = training.init_meta(both.params, lr=[0.3, 0.1, 0.1])
    for batch in task.batches(0, 0):
        both, _ = training.step(meta, both, batch)
    method = methods.scheduled(data, torch.arange(2), meta.hyper.lr.expand(2, -1))
    *_, (_, _, _, alone) = training_curves.steps(method, torch.stack(task.batches(0, 0), dim=1))
    torch.testing.assert_close(both.params, alone.params, rtol=0, atol=1e-13)
