"""The tables and the figure of the biped: late scores, pairs, steps to a return, and runs that diverged."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from bipedal_task import TASK
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from experiments.paper.bipedal import figure, report
from experiments.runner import runs, study

pytestmark = pytest.mark.usefixtures("single_precision")


def test_a_method_of_which_runs_diverged_at_once_is_drawn_without_them(tmp_path):
    tasks = [replace(TASK, method="momentum", scored=1, lr=lr, steps=8 * 64) for lr in (1e30, 1e-3)]
    done = study.carry_out(tasks, tmp_path, workers=1)
    axes = Figure().subplots()
    figure.curve(axes, "momentum", done)
    figure.curve(axes, "adam", done[:1])
    said = [line.get_label() for line in axes.lines]
    assert said == ["momentum (1 of 2 runs)", "Adam (0 of 1 runs)"]
    assert np.size(axes.lines[0].get_xdata()) > 0


def test_the_size_of_p_is_the_last_that_was_written_even_if_a_run_was_resumed(tmp_path):
    for value in (2.0, 3.0):
        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_scalar("eigenvalue_max/value.weight", value, 49)
    found = report.extremes(runs.Finished(None, tmp_path, {}))
    assert found[3, 1] == 3
    assert found.isnan().sum() == 7


def test_late_scores_are_those_of_the_last_fifth_and_a_run_that_diverged_has_none(tmp_path):
    scores = ["", "", *range(2, 10)]
    (tmp_path / "metrics.csv").write_text(
        "step,score\n" + "".join(f"{i},{x}\n" for i, x in enumerate(scores))
    )
    both = [runs.Finished(None, tmp_path, {"diverged": diverged}) for diverged in (False, True)]
    assert report.mean_score(both, 0.2).nan_to_num(-1).tolist() == [8.5, -1]
    assert report.mean_score(both, 1.0).nan_to_num(-1).tolist() == [5.5, -1]


def test_a_pair_of_which_one_has_no_score_is_not_counted():
    figures, said = report.compared(torch.tensor([1.0, torch.nan, -2.0]), "x")
    assert figures == {"x": None, "x_low": None, "x_high": None, "x_p": None, "x_ahead": "1 of 2"}
    assert said == "– (– to –; p –; 1 of 2)"


def test_the_steps_to_a_return_are_those_at_which_the_best_policy_first_has_it(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,steps,best\n0,10,\n1,20,-5\n2,30,201\n3,40,250\n")
    assert report.steps_to(runs.Finished(None, tmp_path, {})) == 30
    (tmp_path / "metrics.csv").write_text("step,steps,best\n0,10,\n1,20,-5\n")
    assert report.steps_to(runs.Finished(None, tmp_path, {})) == math.inf
