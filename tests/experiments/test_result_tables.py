"""What the tables of the vision experiments compare: pairs of a seed, and runs that diverged apart."""

import math

import pytest

from experiments.paper import cifar10
from experiments.reporting import statistics
from experiments.runner.runs import Finished
from experiments.vision import result_tables
from experiments.vision.methods import Method


def done(seed, losses, accuracy, folder, diverged=False):
    """A finished run of two-step epochs with these losses."""
    where = folder / f"{len(list(folder.glob('*')))}"
    where.mkdir()
    rows = "".join(f"{i},{x},0.{i}\n" for i, x in enumerate(losses))
    (where / "metrics.csv").write_text(f"step,loss,validation_accuracy\n{rows}")
    task = cifar10.task(cifar10.PRESETS["smoke"], Method("fop", 0.1), seed, 0)
    return Finished(task, where, {"diverged": diverged, "test_accuracy": accuracy})


def test_against_itself_momentum_is_neither_ahead_nor_behind(tmp_path):
    runs = [done(seed, [4, 3, 1, 1, 1, 1.5], 0.5, tmp_path) for seed in (0, 1)]
    for view, (values, _) in result_tables.views(runs, runs, "test", epoch=2, drop=1).items():
        assert values.tolist() == [1, 1] if view == "steps_ratio" else [0, 0]


def test_pairs_are_those_of_a_seed_whatever_their_order(tmp_path):
    base = [done(seed, [4, 4, 3, 3, seed, seed], 0.5, tmp_path) for seed in (1, 2)]
    mine = [done(2, [4, 4, 2, 2, 1, 1], 0.6, tmp_path)]
    found = {
        view: values for view, (values, _) in result_tables.views(mine, base, "test", epoch=2, drop=1).items()
    }
    assert found["steps_ratio"].tolist() == [4 / 6]
    assert found["final_loss_difference"].tolist() == [-1]
    assert found["accuracy_difference"].tolist() == pytest.approx([10])


def test_a_run_that_diverged_is_counted_and_enters_no_mean(tmp_path):
    base = [done(seed, [4, 4, 3, 3], 0.5, tmp_path) for seed in (0, 1)]
    mine = [done(0, [4, 4, 2, 2], 0.6, tmp_path), done(1, [4, math.nan], 0.1, tmp_path, diverged=True)]
    assert result_tables.spread(result_tables.accuracies(mine, "test")) == (60, None, 1)
    found = result_tables.views(mine, base, "test", epoch=2, drop=2)
    assert found.keys() > {"accuracy_before_the_drop"}
    for values, _ in found.values():
        assert values.isnan().tolist() == [False, True]
        assert statistics.interval(values).mean is None
