"""The output folder of an experiment: what is removed at the start, and what is refused at the end."""

import json
import math

import pytest

from experiments.paper.toy.command import Config
from experiments.reporting.summary import write_summary
from experiments.runner import experiment


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_is_refused(value, tmp_path):
    with pytest.raises(ValueError, match=r"'loss' is .* Pass None"):
        write_summary(tmp_path, {"loss": value})
    assert not (tmp_path / "summary.json").exists()


def test_a_second_run_removes_what_would_pass_for_its_own_and_nothing_else(tmp_path):
    events = "events.out.tfevents.1"
    removed = ["summary.json", "tables.md", events, f"events/{events}", f"events/booth/{events}"]
    kept = ["notes.txt", "events/notes.txt", f"other/{events}"]
    for name in removed + kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    experiment.begin(Config(out=tmp_path))
    assert [name for name in removed + kept if (tmp_path / name).exists()] == kept


def begun_as(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    experiment.begin(Config(out=tmp_path))
    return json.loads((tmp_path / "config.json").read_text())["experiment"]


@pytest.mark.parametrize(
    ("config", "owner"),
    [
        ({"experiment": "experiments.paper.cifar10"}, "experiments.paper.cifar10"),
        ({"model_type": "bert"}, "another program"),
    ],
    ids=str,
)
def test_a_folder_with_the_files_of_another_is_refused_and_left_as_it_is(config, owner, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    said = f"--out {tmp_path} holds the files of {owner}, .* Pass another folder, or delete .*config.json"
    with pytest.raises(SystemExit, match=said):
        begun_as(tmp_path, **config)
    assert json.loads((tmp_path / "config.json").read_text()) == config
    assert (tmp_path / "summary.json").exists()


def test_a_folder_of_the_same_experiment_is_taken_though_its_module_was_moved_or_its_settings_cut_off(
    tmp_path,
):
    own = Config.__module__
    assert begun_as(tmp_path, experiment=own) == own
    assert begun_as(tmp_path, experiment="experiments.toy_before_it_was_moved") == own
    (tmp_path / "config.json").write_text('{"experim')
    experiment.begin(Config(out=tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["experiment"] == own
