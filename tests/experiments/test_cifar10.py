"""`cifar10` tunes every method alike; a flag overrules its preset."""

import math
from dataclasses import replace

import pytest
from commands import smoke

from experiments.__main__ import main
from experiments.paper import cifar10, structure


def test_cifar10_tunes_every_method_alike_and_compares_it_with_momentum(tmp_path):
    summary, text = smoke("cifar10", tmp_path, "--epochs", "1")
    for name in cifar10.COMPARED:
        assert 0 <= summary[f"{name}_accuracy"] <= 100
        assert math.isfinite(summary[f"{name}_additional_time_percent"])
    for name in cifar10.COMPARED[1:]:
        assert {f"{name}_{view}" for view in ("steps_ratio", "accuracy_difference_low")} <= summary.keys()
    assert summary["fop_additional_parameters"] == summary["fop-paper_additional_parameters"] == 569
    assert summary["momentum_additional_parameters"] == summary["muon_additional_parameters"] == 0
    assert "| FOP, printed rule | " in text
    assert "91.5 ± 0.2" in text
    assert "256 images" in text
    assert (tmp_path / "cifar10.png").stat().st_size > 10_000
    tuning = list((tmp_path / "runs").glob(f"*seed{cifar10.TUNING_SEED}*"))
    assert len(tuning) == 2 * len(cifar10.COMPARED) + 1  # and FOP at another meta learning rate
    assert not any("test_accuracy" in (folder / "result.json").read_text() for folder in tuning)


@pytest.mark.parametrize("experiment", [cifar10, structure])
def test_the_paper_preset_is_the_papers(experiment):
    config = experiment.PRESETS["paper"]
    assert (config.epochs, config.decay, config.batch, config.images) == (150, 80, 128, 50_000)
    assert tuple(config.widths) == (96, 192)


def test_the_paper_preset_of_cifar10_trains_every_variant_at_the_papers_rate():
    config = cifar10.PRESETS["paper"]
    assert config.settings == 0
    chosen = cifar10.untuned(config)
    assert {chosen[name].lr for name in cifar10.PRINTED} == {0.05}
    assert {chosen[name].meta_lr for name in cifar10.PRINTED} == {None}  # the preset's, 1e-4
    task = cifar10.task(config, chosen["fop-paper"], 0, config.test)
    assert (task.epochs, task.decays, task.batch, task.validation) == (150, (80,), 128, 0)


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--images", "500"],
            "has 512 training and 256 test images; 500 to train on, 128 to .* Ask for fewer",
        ),
        (["--test", "257"], "has 512 training and 256 test images; .* 257 to test on .* Ask for fewer"),
        (["--batch", "300"], "256 images to train on, fewer than a batch of 300. Pass a smaller --batch"),
    ],
    ids=str,
)
def test_more_images_than_there_are_is_refused_before_anything_runs(flags, said, tmp_path):
    with pytest.raises(SystemExit, match=said):
        main(["cifar10", "--preset", "smoke", "--out", str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("settings", [-1, 5])
def test_as_many_settings_as_the_grid_has_can_be_tuned(settings):
    with pytest.raises(ValueError, match="settings must be from 0 to 4"):
        cifar10.Config(settings=settings)


def test_every_method_has_as_many_settings():
    for settings in (1, 2, 3, 4):
        assert {len(cifar10.grid(name, settings)) for name in cifar10.COMPARED} == {settings}
