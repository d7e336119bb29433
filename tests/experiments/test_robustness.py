"""`robustness` runs from its command; better and worse are by one deviation."""

import pytest
import torch
from commands import smoke

from experiments.paper import robustness


def test_robustness_counts_cells_and_failures(tmp_path):
    summary, text = smoke("robustness", tmp_path)
    assert summary["fop_cells"] + summary["fop_cells_where_both_fail"] == 2
    assert summary["fop_base_runs_failed"] >= 2  # at a learning rate of a million
    assert "| momentum 0.9, lr 1e+06 | " in text
    assert (tmp_path / "robustness.png").stat().st_size > 10_000


def test_the_paper_preset_of_robustness_has_three_runs_of_150_epochs():
    config = robustness.PRESETS["paper"]
    tasks = robustness.grid(config, "fop-paper-5e-4")
    assert len(tasks) == 3 * len(config.lrs) * len(config.momenta)
    assert {(task.epochs, task.decays) for task in tasks} == {(150, (80,))}


def cells(*accuracies):
    accuracy = torch.tensor([accuracies], dtype=torch.float64)
    return robustness.Cells(accuracy, accuracy < 15)


def test_a_cell_in_which_more_runs_fail_is_worse_however_they_spread():
    found = robustness.compared(cells([70, 70, 10]), cells([70, 70, 70]))
    assert found.gain.abs() < found.deviation
    assert found.worse.item()


def test_a_cell_in_which_both_fail_is_neither_better_nor_worse_and_does_not_count():
    found = robustness.compared(cells([10, 10], [60, 61]), cells([10, 10], [50, 51]))
    assert found.better.tolist() == [[False, True]]
    assert found.worse.tolist() == [[False, False]]
    assert found.informative.tolist() == [[False, True]]


@pytest.mark.parametrize(("gain", "better", "worse"), [(0.9, 0, 0), (1.1, 1, 0), (-0.9, 0, 0), (-1.1, 0, 1)])
def test_better_and_worse_are_by_one_deviation(gain, better, worse):
    base = torch.tensor([49.0, 50.0, 51.0])
    found = robustness.compared(cells((base + gain).tolist()), cells(base.tolist()))
    assert found.deviation.item() == pytest.approx(1)
    assert (found.better.item(), found.worse.item()) == (better, worse)
