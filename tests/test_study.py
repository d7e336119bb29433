"""A run that was killed goes on to the same bits, a finished one is not repeated, a failed one is named."""

import csv
import json
import multiprocessing
import os
import signal
from dataclasses import dataclass, replace

import pytest
from filelock import FileLock
from killing import assert_kills_change_no_bit, assert_same_bits, begun, finish, kill_on_the_way
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.runner import runs, study
from experiments.vision import loop
from experiments.vision.methods import LOOKS, Method
from experiments.vision.task import Classify

pytestmark = pytest.mark.usefixtures("single_precision")
TASK = Classify(
    method=Method("fop", 0.05),
    seed=3,
    data="generated",
    images=320,
    validation=64,
    test=64,
    model="all-conv",
    widths=(2, 4),
    epochs=6,
    decays=(2.5,),
    batch=16,
    keep_matrices=True,
)
SHORT = replace(TASK, epochs=1, keep_matrices=False)


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


def test_a_finished_run_is_not_run_again_and_another_setting_is_another_run(tmp_path, capsys):
    [first] = study.carry_out([SHORT], tmp_path, workers=1)
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    capsys.readouterr()
    [again] = study.carry_out([SHORT], tmp_path, workers=1)
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == before
    other = replace(SHORT, method=Method("fop", 0.05, meta_lr=1e-3))
    assert runs.folder_of(other, tmp_path) != first.folder
    assert runs.finished(other, tmp_path) is None


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


def test_side_by_side_is_as_one_after_the_other(tmp_path):
    tasks = [replace(SHORT, seed=seed) for seed in (0, 1, 2)]
    together = study.carry_out(tasks, tmp_path / "together", workers=2)
    assert [run.task for run in together] == tasks
    study.carry_out(tasks, tmp_path / "alone", workers=1)
    for task in tasks:
        assert_same_bits(task, tmp_path / "together", tmp_path / "alone")


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path):
    tasks = [replace(SHORT, images=10_000), SHORT]
    with pytest.raises(SystemExit, match=r"1 of 2 runs are not done; .* error\.txt in .*The same command"):
        study.carry_out(tasks, tmp_path, workers=1)
    said = (runs.folder_of(tasks[0], tmp_path) / "error.txt").read_text()
    assert "10000 to train on" in said
    assert runs.finished(SHORT, tmp_path) is not None


@dataclass(frozen=True)
class Killed(Classify):
    """A run whose process is killed, as by the system when memory is short."""

    def start(self):
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_worker_that_is_killed_takes_only_its_run_with_it(tmp_path):
    killed = Killed(**{name: getattr(SHORT, name) for name in SHORT.__dataclass_fields__})
    tasks = [killed, replace(SHORT, seed=1), replace(SHORT, seed=2)]
    with pytest.raises(SystemExit, match="1 of 3 runs are not done"):
        study.carry_out(tasks, tmp_path, workers=2)
    assert "exit code -9" in (runs.folder_of(killed, tmp_path) / "error.txt").read_text()
    assert all(runs.finished(task, tmp_path) for task in tasks[1:])


def test_the_workers_of_a_study_that_is_killed_end_with_it(tmp_path):
    first, second = replace(TASK, epochs=1000), replace(TASK, seed=4)
    process = multiprocessing.get_context("spawn").Process(
        target=study.carry_out, args=([first, second], tmp_path, 2)
    )
    process.start()
    while runs.finished(second, tmp_path) is None:
        process.join(0.1)
        assert process.is_alive()
    process.kill()
    process.join()
    with FileLock(runs.folder_of(first, tmp_path) / "lock", timeout=30):  # held as long as the worker lives
        assert runs.finished(first, tmp_path) is None
    assert [one.task for one in study.carry_out([second], tmp_path, 2)] == [second]


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


def test_a_study_without_workers_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="needs a worker, got --workers 0"):
        study.carry_out([SHORT], tmp_path, workers=0)


def test_a_run_that_diverges_ends_there_and_says_so(tmp_path):
    [run] = study.carry_out([replace(SHORT, method=Method("momentum", 1e30))], tmp_path, workers=1)
    assert run.result["diverged"]
    assert run.result["validation_loss"] is None
    assert len(run.metrics()["step"]) <= 20


@pytest.mark.parametrize("name", LOOKS)
def test_within_a_seed_every_method_starts_from_the_same_network_and_batch(name, tmp_path):
    tasks = [replace(SHORT, method=Method(each, 0.01)) for each in ("momentum", name)]
    first, other = (run.metrics()["loss"][0] for run in study.carry_out(tasks, tmp_path, workers=1))
    assert first == other


def test_the_test_images_are_looked_at_in_the_end_only_and_not_at_all_while_tuning(tmp_path, monkeypatch):
    seen = []
    figures = loop.Loop._figures

    def spied(self, name, batches):
        if batches is not None:
            seen.append(name)
        return figures(self, name, batches)

    monkeypatch.setattr(loop.Loop, "_figures", spied)
    study.carry_out([replace(SHORT, epochs=2)], tmp_path, workers=1)
    assert seen == ["validation", "validation", "validation", "test"]
    seen.clear()
    study.carry_out([replace(SHORT, epochs=2, test=0)], tmp_path, workers=1)
    assert "test" not in seen


def test_no_two_methods_share_a_colour():
    assert len({look.colour for look in LOOKS.values()}) == len(LOOKS)
