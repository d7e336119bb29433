"""Statistics over seeds are those of scipy, and of the definitions."""

import math

import pytest
import torch
from scipy import stats

from experiments.reporting import statistics
from experiments.reporting.statistics import median


def test_steps_are_counted_to_the_first_epoch_at_the_target():
    losses = torch.tensor([[4, 2, 0, 0], [4, 4, 2, 2], [4, 4, 4, 4]], dtype=torch.float64)
    found = [statistics.steps_to(row, target, 2) for row, target in zip(losses, (1.0, 2.0, 3.0), strict=True)]
    assert found[:2] == [3, 4]
    assert math.isnan(found[2])
    assert math.isnan(statistics.steps_to(losses[0, :1], 5.0, 2))  # it diverged within an epoch


def test_the_interval_and_the_p_value_are_students(generator):
    values = torch.randn(5, generator=generator)
    expected = stats.t.interval(0.95, 4, loc=values.mean().item(), scale=stats.sem(values.numpy()))
    assert statistics.interval(values)[1:] == pytest.approx(expected)
    t = values.mean() / (values.std() / 5**0.5)
    assert statistics.p_value(values) == pytest.approx(2 * stats.t.sf(abs(t.item()), 4))
    assert statistics.interval(values[:1])[1:] == (None, None)
    assert statistics.interval(torch.tensor([1.0, math.nan])) == (None, None, None)


def test_the_geometric_mean_of_ratios_is_between_them():
    found = statistics.geometric(torch.tensor([0.5, 2.0, 1.0]))
    assert found.mean == pytest.approx(1)
    assert found.low is not None
    assert found.low < 1


def test_a_median_has_the_interval_of_its_bootstrap_and_of_few_seeds_that_is_their_range():
    found = median(torch.tensor([[1.0], [2.0], [7.0]]))
    assert [x.item() for x in found] == [2.0, 1.0, 7.0]
    many = median(torch.arange(101.0)[:, None])
    assert many.middle.item() == 50.0
    assert 25 < many.low.item() < 45 < 55 < many.high.item() < 75
