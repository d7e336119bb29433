"""Many runs: finished ones are not repeated, failed ones are named, workers end with their study."""

import multiprocessing
import os
import signal
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import pytest
from filelock import FileLock
from killing import assert_same_bits
from vision_tasks import SHORT, TASK

from experiments.runner import runs, study
from experiments.vision.methods import Method
from experiments.vision.task import Classify

pytestmark = pytest.mark.usefixtures("single_precision")


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
class Misread(Classify):
    """A run whose error tells of another process, as that of images that are read by several."""

    kind: ClassVar[str] = "misread"

    def start(self):
        raise RuntimeError(
            "Caught RuntimeError in process 0.\nTraceback:\n  …\nRuntimeError: Cannot read a.png.\n"
        )


def test_the_last_line_of_a_long_error_is_shown_and_all_of_it_kept(tmp_path, capsys):
    misread = Misread(**{field.name: getattr(SHORT, field.name) for field in fields(SHORT)})
    with pytest.raises(SystemExit):
        study.carry_out([misread], tmp_path, workers=1)
    assert "FAILED: RuntimeError: Cannot read a.png. (0 s)" in capsys.readouterr().out
    assert "in process 0" in (runs.folder_of(misread, tmp_path) / "error.txt").read_text()


def test_a_run_that_is_asked_for_twice_is_run_once(tmp_path, capsys):
    first, again = study.carry_out([SHORT, replace(SHORT)], tmp_path, workers=2)
    assert first == again
    assert capsys.readouterr().out.count(SHORT.name) == 1


@dataclass(frozen=True)
class Killed(Classify):
    """A run whose process is killed, as by the system when memory is short."""

    kind: ClassVar[str] = "killed"

    def start(self):
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_worker_that_is_killed_takes_only_its_run_with_it(tmp_path):
    killed = Killed(**{field.name: getattr(SHORT, field.name) for field in fields(SHORT)})
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


def test_a_study_without_workers_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="needs a worker, got --workers 0"):
        study.carry_out([SHORT], tmp_path, workers=0)
