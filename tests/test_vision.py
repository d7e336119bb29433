"""Every study of the paper's vision results runs from its command, and says what it saw."""

import json
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from experiments.__main__ import main
from experiments.paper import cifar10, mnist_rank, robustness, structure
from experiments.reporting import statistics as paired
from experiments.runner.runs import Finished
from experiments.vision import result_tables as tables
from experiments.vision.methods import Method


def smoke(name, out, *flags):
    main([name, "--preset", "smoke", "--out", str(out), *flags])
    return json.loads((out / "summary.json").read_text()), (out / "tables.md").read_text()


def test_cifar10_tunes_every_method_alike_and_compares_it_with_momentum(tmp_path):
    summary, text = smoke("cifar10", tmp_path, "--epochs", "1")
    for name in cifar10.METHODS:
        assert 0 <= summary[f"{name}_accuracy"] <= 100
        assert math.isfinite(summary[f"{name}_additional_time_percent"])
    for name in cifar10.METHODS[1:]:
        assert {f"{name}_{view}" for view in ("steps_ratio", "accuracy_difference_low")} <= summary.keys()
    assert summary["fop_additional_parameters"] == summary["fop-paper_additional_parameters"] == 569
    assert summary["momentum_additional_parameters"] == summary["muon_additional_parameters"] == 0
    assert "| FOP, printed rule | " in text
    assert "91.5 ± 0.2" in text
    assert "256 images" in text
    assert (tmp_path / "cifar10.png").stat().st_size > 10_000
    tuning = list((tmp_path / "runs").glob(f"*seed{cifar10.TUNING_SEED}*"))
    assert len(tuning) == 2 * len(cifar10.METHODS) + 1  # and FOP at another meta learning rate
    assert not any("test_accuracy" in (folder / "result.json").read_text() for folder in tuning)


def test_mnist_rank_compares_every_rank_with_momentum_and_shows_angles(tmp_path):
    summary, text = smoke("mnist-rank", tmp_path)
    assert {"lr0.01_fop_rank2_p", "lr0.01_fop-paper_rank784_gain_low"} <= summary.keys()
    assert 0 < summary["lr0.01_fop_layer1_last_angle"] < 45
    assert "| FOP | full | " in text
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("ranks.png", "angles.png"))


def test_robustness_counts_cells_and_failures(tmp_path):
    summary, text = smoke("robustness", tmp_path)
    assert summary["fop_cells"] + summary["fop_cells_where_both_fail"] == 2
    assert summary["fop_base_runs_failed"] >= 2  # at a learning rate of a million
    assert "| momentum 0.9, lr 1e+06 | " in text
    assert (tmp_path / "robustness.png").stat().st_size > 10_000


def test_structure_shows_what_each_position_of_a_kernel_weighs(tmp_path):
    summary, text = smoke("structure", tmp_path)
    for layer in range(1, 8):
        assert summary[f"fop_layer{layer}_self"] == pytest.approx(1, abs=0.2)
        assert summary[f"fop-paper_layer{layer}_eigenvalue_min"] > 0
    assert "| FOP | 7 | " in text
    pictures = ("matrices", "histograms", "eigenvalues", "weights")
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in pictures)


@pytest.mark.parametrize("experiment", [cifar10, structure])
def test_the_paper_preset_is_the_papers(experiment):
    config = experiment.PRESETS["paper"]
    assert (config.epochs, config.decay, config.batch, config.images) == (150, 80, 128, 50_000)
    assert tuple(config.widths) == (96, 192)


def test_the_paper_preset_of_cifar10_trains_every_variant_at_the_papers_rate():
    config = cifar10.PRESETS["paper"]
    assert config.settings == 0
    chosen = cifar10.untuned(config)
    assert {chosen[name].lr for name in cifar10.PAPER} == {0.05}
    assert {chosen[name].meta_lr for name in cifar10.PAPER} == {None}  # the preset's, 1e-4
    task = cifar10.task(config, chosen["fop-paper"], 0, config.test)
    assert (task.epochs, task.decays, task.batch, task.validation) == (150, (80,), 128, 0)


def test_the_paper_preset_of_robustness_has_three_runs_of_150_epochs():
    config = robustness.PRESETS["paper"]
    tasks = robustness.grid(config, "fop-paper-5e-4")
    assert len(tasks) == 3 * len(config.lrs) * len(config.momenta)
    assert {(task.epochs, task.decays) for task in tasks} == {(150, (80,))}


def test_the_ranks_of_the_paper_are_those_of_small():
    assert mnist_rank.PRESETS["small"].ranks == (0, 1, 2, 4, 16, 64, 784)


@pytest.mark.parametrize("flags", [["--preset", "paper"], ["--preset=paper"]], ids=str)
def test_a_flag_overrules_its_preset_and_help_shows_it(flags, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(cifar10, "main", asked.append)
    main(["cifar10", "--epochs", "3", *flags])
    assert asked == [replace(cifar10.PRESETS["paper"], epochs=3)]
    with pytest.raises(SystemExit):
        main(["cifar10", *flags, "--help"])
    assert "(default: 50000)" in capsys.readouterr().out


def test_a_data_folder_without_the_data_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("METAFOP_DATA", "")  # which the command sets, for its workers
    with pytest.raises(
        SystemExit, match=r"data_batch_1\.bin is missing; .*python -m experiments fetch --data"
    ):
        main(["cifar10", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


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
    for view, (values, _) in tables.views(runs, runs, "test", epoch=2, drop=1).items():
        assert values.tolist() == [1, 1] if view == "steps_ratio" else [0, 0]


def test_pairs_are_those_of_a_seed_whatever_their_order(tmp_path):
    base = [done(seed, [4, 4, 3, 3, seed, seed], 0.5, tmp_path) for seed in (1, 2)]
    mine = [done(2, [4, 4, 2, 2, 1, 1], 0.6, tmp_path)]
    found = {view: values for view, (values, _) in tables.views(mine, base, "test", epoch=2, drop=1).items()}
    assert found["steps_ratio"].tolist() == [4 / 6]
    assert found["final_loss_difference"].tolist() == [-1]
    assert found["accuracy_difference"].tolist() == pytest.approx([10])


def test_a_run_that_diverged_is_counted_and_enters_no_mean(tmp_path):
    base = [done(seed, [4, 4, 3, 3], 0.5, tmp_path) for seed in (0, 1)]
    mine = [done(0, [4, 4, 2, 2], 0.6, tmp_path), done(1, [4, math.nan], 0.1, tmp_path, diverged=True)]
    assert tables.spread(tables.accuracies(mine, "test")) == (60, None, 1)
    found = tables.views(mine, base, "test", epoch=2, drop=2)
    assert found.keys() > {"accuracy_before_the_drop"}
    for values, _ in found.values():
        assert values.isnan().tolist() == [False, True]
        assert paired.interval(values).mean is None


def cells(*accuracies):
    accuracy = torch.tensor([accuracies], dtype=torch.float64)
    return robustness.Cells(accuracy, accuracy < 15)


def test_a_cell_in_which_more_runs_fail_is_worse_however_they_spread():
    found = robustness.verdict(cells([70, 70, 10]), cells([70, 70, 70]))
    assert found.gain.abs() < found.deviation
    assert found.worse.item()


def test_a_cell_in_which_both_fail_is_neither_better_nor_worse_and_does_not_count():
    found = robustness.verdict(cells([10, 10], [60, 61]), cells([10, 10], [50, 51]))
    assert found.better.tolist() == [[False, True]]
    assert found.worse.tolist() == [[False, False]]
    assert found.says.tolist() == [[False, True]]


@pytest.mark.parametrize(("gain", "better", "worse"), [(0.9, 0, 0), (1.1, 1, 0), (-0.9, 0, 0), (-1.1, 0, 1)])
def test_better_and_worse_are_by_one_deviation(gain, better, worse):
    base = torch.tensor([49.0, 50.0, 51.0])
    found = robustness.verdict(cells((base + gain).tolist()), cells(base.tolist()))
    assert found.deviation.item() == pytest.approx(1)
    assert (found.better.item(), found.worse.item()) == (better, worse)


@pytest.mark.parametrize("settings", [-1, 5])
def test_as_many_settings_as_the_grid_has_can_be_tuned(settings):
    with pytest.raises(ValueError, match="settings must be from 0 to 4"):
        cifar10.Config(settings=settings)


def test_every_method_has_as_many_settings():
    for settings in (1, 2, 3, 4):
        assert {len(cifar10.grid(name, settings)) for name in cifar10.METHODS} == {settings}


def test_steps_are_counted_to_the_first_epoch_at_the_target():
    losses = torch.tensor([[4, 2, 0, 0], [4, 4, 2, 2], [4, 4, 4, 4]], dtype=torch.float64)
    found = [paired.steps_to(row, target, 2) for row, target in zip(losses, (1.0, 2.0, 3.0), strict=True)]
    assert found[:2] == [3, 4]
    assert math.isnan(found[2])
    assert math.isnan(paired.steps_to(losses[0, :1], 5.0, 2))  # it diverged within an epoch


def test_the_interval_and_the_p_value_are_students(generator):
    values = torch.randn(5, generator=generator)
    expected = stats.t.interval(0.95, 4, loc=values.mean().item(), scale=stats.sem(values.numpy()))
    assert paired.interval(values)[1:] == pytest.approx(expected)
    t = values.mean() / (values.std() / 5**0.5)
    assert paired.p_value(values) == pytest.approx(2 * stats.t.sf(abs(t.item()), 4))
    assert paired.interval(values[:1])[1:] == (None, None)
    assert paired.interval(torch.tensor([1.0, math.nan])) == (None, None, None)


def test_the_geometric_mean_of_ratios_is_between_them():
    found = paired.geometric(torch.tensor([0.5, 2.0, 1.0]))
    assert found.mean == pytest.approx(1)
    assert found.low is not None
    assert found.low < 1
