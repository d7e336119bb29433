"""One run and its folder: killed runs resume to the same bits, one process writes, damage is named."""

import csv
import json
from dataclasses import replace

import pytest
from killing import assert_kills_change_no_bit, begun, finish, kill_on_the_way
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from vision_tasks import SHORT, TASK

from experiments.runner import runs, study
from experiments.vision.methods import Method

pytestmark = pytest.mark.usefixtures("single_precision")


@pytest.mark.parametrize("name", ["fop", "muon", "adam"])
def test_a_run_killed_at_ten_random_moments_ends_with_the_bits_of_an_undisturbed_one(name, tmp_path):
    assert_kills_change_no_bit(replace(TASK, method=Method(name, 0.01)), tmp_path)


def test_tensorboard_shows_a_killed_run_once(tmp_path):
    kill_on_the_way(TASK, tmp_path)
    finish(TASK, tmp_path)
    folder = runs.folder_of(TASK, tmp_path)
    events = EventAccumulator(str(folder)).Reload()
    with (folder / "metrics.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2
    assert [event.step for event in events.Scalars("loss")] == list(range(120))
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses, rel=1e-6)


def test_a_run_keeps_its_settings_versions_commit_and_machine(tmp_path):
    [run] = study.carry_out([SHORT], tmp_path, workers=1)
    config = json.loads((run.folder / "config.json").read_text())
    assert config["settings"]["method"] == {
        "name": "fop",
        "lr": 0.05,
        "momentum": 0.9,
        "meta_lr": None,
        "rank": None,
    }
    assert config["settings"]["images"] == 320
    [part] = config["parts"]
    assert part["versions"].keys() == {"metafop", "torch", "python"}
    assert {"step", "threads", "commit", "machine"} <= part.keys()
    assert not (run.folder / "checkpoint.pt").exists()
    metrics = run.metrics()
    assert metrics["step"].tolist() == list(range(20))
    assert metrics["loss"].isfinite().all()
    assert metrics["validation_accuracy"].isnan().sum() == 19
    assert run.result["validation_accuracy"] == metrics["validation_accuracy"][-1]


def test_two_processes_never_write_one_run(tmp_path):
    process, connection = begun(TASK, tmp_path)
    connection.recv()
    with pytest.raises(runs.InUse, match=r"is being written by another process\. Wait for it"):
        runs.carry_out(TASK, tmp_path, lambda epochs: None)
    with pytest.raises(SystemExit, match="1 of 1 runs are not done"):
        study.carry_out([TASK], tmp_path, workers=1)
    assert not (runs.folder_of(TASK, tmp_path) / "error.txt").exists()
    process.kill()
    process.join()


def test_a_run_that_goes_on_notes_from_where_and_what_it_is_made_by(tmp_path):
    kill_on_the_way(TASK, tmp_path)
    finish(TASK, tmp_path)
    config = json.loads((runs.folder_of(TASK, tmp_path) / "config.json").read_text())
    assert [part["step"] for part in config["parts"]] == [0, 9]


def test_a_damaged_checkpoint_is_named_with_its_remedy(tmp_path, capsys):
    checkpoint = runs.folder_of(SHORT, tmp_path) / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"")
    with pytest.raises(SystemExit):
        study.carry_out([SHORT], tmp_path, workers=1)
    assert "cannot be read. Delete it to start this run again" in capsys.readouterr().out.replace("\n", " ")
    checkpoint.unlink()
    assert study.carry_out([SHORT], tmp_path, workers=1)


def test_what_a_kill_left_between_the_result_and_the_end_is_tidied(tmp_path):
    [run] = study.carry_out([SHORT], tmp_path, workers=1)
    (run.folder / "checkpoint.pt").write_bytes(b"")
    assert runs.carry_out(SHORT, tmp_path, lambda epochs: None) == run
    assert not (run.folder / "checkpoint.pt").exists()


def test_a_result_lost_with_the_power_is_made_again(tmp_path):
    [run] = study.carry_out([SHORT], tmp_path, workers=1)
    (run.folder / "result.json").write_text("")
    [again] = study.carry_out([SHORT], tmp_path, workers=1)
    assert again.result | {"seconds": 0} == run.result | {"seconds": 0}
