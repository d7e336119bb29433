"""The folder of a run has one writer, and its files are whole at every moment."""

import multiprocessing
import os
import signal
import stat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from events import points
from problems import assert_same_bits
from valley import ESTIMATORS, Interrupted, kept, run

from metafop import run_folder
from metafop.run_folder import RunFolder


def in_use(folder):
    return pytest.raises(
        RuntimeError, match=rf"{folder} is in use by another meta_train\. Wait for it, end it"
    )


def test_a_folder_may_be_deep_and_not_exist_yet(tmp_path):
    run(tmp_path / "one" / "two", steps=2)
    assert len(kept(tmp_path / "one" / "two")["history"]) == 2


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"takes a folder, got the file {tmp_path / 'file'}\. Pass another"):
        run(tmp_path / "file", steps=2)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_run_goes_on(
    tmp_path, monkeypatch
):
    did, names, fsync, replace = [], [], os.fsync, os.replace

    def synced(fd):
        did.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def replaced(source, target):
        assert len(list(tmp_path.glob("checkpoint.pt"))) == (len(names) > 0)
        if names:  # whoever reads meanwhile sees the last one, whole
            assert len(kept(tmp_path)["history"]) == 2 * len(names)
        did.append("name")
        names.append(source)
        replace(source, target)

    monkeypatch.setattr(run_folder.os, "fsync", synced)
    monkeypatch.setattr(run_folder.os, "replace", replaced)
    run(tmp_path)
    assert did == 4 * ["file", "name", "folder"]
    assert len(set(names)) == 4


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    save = torch.save

    def full_disk(content, file):
        if len(content["history"]) == 6:
            file.write(b"half of a checkpoint")
            raise Interrupted
        save(content, file)

    monkeypatch.setattr(run_folder.torch, "save", full_disk)
    with pytest.raises(Interrupted):
        run(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.glob("*.part")) == []
    resumed = run(tmp_path)
    assert_same_bits(resumed.state, run().state)
    assert [step for step, _ in points(tmp_path, "value")] == list(range(8))


def test_a_folder_is_free_again_after_a_run_and_after_a_failure(tmp_path):
    with RunFolder(tmp_path), in_use(tmp_path):
        run(tmp_path)
    with pytest.raises(Interrupted):
        run(tmp_path, fails=((3, 0),))
    assert_same_bits(run(tmp_path).state, run().state)


def write_and_wait(folder, connection):
    """Train until the third checkpoint is written but for its name; tell so, and wait."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    replace, names = os.replace, []

    def waiting(source, target):
        names.append(source)
        if len(names) == 3:
            connection.send(str(source))
            connection.recv()
        replace(source, target)

    run_folder.os.replace = waiting
    run(folder, windows=3, estimator=ESTIMATORS["evolution"])


class Writer(NamedTuple):
    process: Any
    connection: Any
    part: Path  # what it is writing


@pytest.fixture
def writer(tmp_path):
    """A process that writes to `tmp_path`, stopped in the middle of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "metafop.meta_training"])
    ours, theirs = context.Pipe()
    process = context.Process(target=write_and_wait, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    yield Writer(process, ours, Path(ours.recv()))
    process.kill()
    process.join()


def test_a_second_process_is_refused_and_what_it_reads_is_whole(writer, tmp_path):
    before = sorted(tmp_path.iterdir())
    with in_use(tmp_path):
        run(tmp_path, windows=3, estimator=ESTIMATORS["evolution"])
    assert len(kept(tmp_path)["history"]) == 4
    assert sorted(tmp_path.iterdir()) == before
    writer.connection.send("go on")
    writer.process.join()
    assert writer.process.exitcode == 0
    assert len(kept(tmp_path)["history"]) == 8


def test_a_killed_process_leaves_no_lock_and_its_run_goes_on(writer, tmp_path):
    writer.process.kill()
    writer.process.join()
    assert writer.process.exitcode == -signal.SIGKILL
    assert writer.part.exists()
    settings: Any = {"windows": 3, "estimator": ESTIMATORS["evolution"]}
    assert_same_bits(run(tmp_path, **settings).state, run(**settings).state)
    assert list(tmp_path.glob("*.part")) == []
