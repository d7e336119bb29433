"""`attribution` runs from its command; what it predicts is the derivative of what it retrains."""

import pytest
import torch
from commands import smoke
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.data.generated import generated
from experiments.studies.attribution.influences import METHODS, correlations, influences, predicted, subsets
from experiments.studies.attribution.problem import losses, problem, retrained, trained
from metafop.hypergradients import adjoint

EXAMPLES, UNSEEN = 40, 3


@pytest.fixture
def own(generator):
    dataset = generated((1, 8, 8), training=100, test=20)
    found = problem(dataset, EXAMPLES, UNSEEN, epochs=2, lr=0.02, generator=generator)
    return found


def test_smoke_writes_what_it_says(tmp_path):
    summary, tables = smoke("attribution", tmp_path)
    for method, label in METHODS.items():
        assert -1 <= summary[f"{method}_0.05"] <= 1
        assert f"| {label} |" in tables
    assert summary["adjoint_0.05"] > 0.9
    assert (
        summary["adjoint_0.05_worst_digit"] <= summary["adjoint_0.05_worst_seed"] <= summary["adjoint_0.05"]
    )
    assert summary["adjoint_0.05_slope"] == pytest.approx(1, abs=0.2)
    assert summary["lr_0.005_metasmoothness"] <= 1
    assert (tmp_path / "attribution.png").stat().st_size > 10_000
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("correlation/adjoint")[-1].step == 50


def test_an_influence_is_what_training_again_with_another_weight_gives(own):
    influence = influences(own, adjoint, own.carry, own.batches)
    h = 0.02
    more, less = (retrained(own, 1 + sign * h * torch.eye(EXAMPLES)) for sign in (1, -1))
    torch.testing.assert_close((more - less).T / (2 * h), influence, rtol=2e-2, atol=2e-4)


def test_runs_side_by_side_are_the_runs(own):
    expected = losses(trained(own).params, own.unseen)
    weights = torch.cat(
        [torch.ones(1, EXAMPLES), subsets(EXAMPLES, 0.5, 2, torch.Generator().manual_seed(0))]
    )
    found = retrained(own, weights)
    torch.testing.assert_close(found[0], expected)
    assert ((found[1:] - expected).abs() > 1e-4).all()


def test_subsets_are_of_the_share_that_is_asked_for(generator):
    weights = subsets(200, 0.05, 30, generator)
    assert ((weights == 0).sum(1) == 10).all()
    assert ((weights == 1).sum(1) == 190).all()
    assert len(weights.unique(dim=0)) == 30


def test_what_is_predicted_is_the_sum_of_what_was_dropped():
    influence = torch.tensor([[1.0, 2.0, 4.0]])
    weights = torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    torch.testing.assert_close(predicted(influence, weights), torch.tensor([[-5.0], [0.0]]))


def test_correlations_are_of_ranks_for_each_digit():
    guess = torch.tensor([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]])
    found = correlations(guess, torch.tensor([[1.0, 1.0], [10.0, 2.0], [11.0, 30.0]]))
    torch.testing.assert_close(found, torch.tensor([1.0, -1.0]).double())
