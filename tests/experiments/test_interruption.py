"""Ctrl-C ends an experiment and all its processes with one line that says what is saved, and no traceback."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.__main__ import COMMANDS
from experiments.paper.toy.command import Config

ROOT = Path(__file__).parents[2]
NOTHING = "Interrupted. Nothing is saved: the same command starts again.\n"
RUNS = "Interrupted. Finished runs and checkpoints are in {out}: the same command goes on from there.\n"

WAITING = """
import threading
from experiments.runner import interruption

def main():
    print("at work", flush=True)
    threading.Event().wait()

interruption.run(main)
"""
TIDYING = """
import threading
from experiments.runner import interruption

def main():
    try:
        print("at work", flush=True)
        threading.Event().wait()
    finally:
        print("tidying", flush=True)
        threading.Event().wait()

interruption.run(main)
"""
SWALLOWING = """
import threading
from experiments.runner import interruption

class Deaf:
    def __del__(self):
        print("at work", flush=True)
        threading.Event().wait()

def main():
    Deaf()
    threading.Event().wait()

interruption.run(main)
"""
MEASURING = """
import threading
from experiments.measuring.isolation import isolated
from experiments.runner import interruption

def measure():
    print("at work", flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    interruption.run(lambda: isolated([], measure))
"""
IGNORING = """
import signal, sys
from experiments.runner import interruption

def main():
    print("at work", flush=True)
    print(sys.stdin.read(), end="", flush=True)

signal.signal(signal.SIGINT, signal.SIG_IGN)
interruption.run(main)
"""


@pytest.fixture(autouse=True)
def _heard():
    """A suite that a shell began in the background ignores SIGINT, and so would all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def begin():
    """Give what begins a command as a terminal does: in a group, which Ctrl-C reaches as a whole."""
    processes = []

    def begin(*command):
        processes.append(
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return processes[-1]

    yield begin
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def begin_script(begin, tmp_path):
    """Give what begins a script, and returns when it is at work."""

    def begin_script(text):
        (tmp_path / "script.py").write_text(text)
        process = begin(tmp_path / "script.py")
        assert process.stdout.readline() == "at work\n"
        return process

    return begin_script


def interrupt(process):
    os.killpg(process.pid, signal.SIGINT)


def wait_for(process, folder, pattern):
    while not list(folder.glob(pattern)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
        assert process.poll() is None, process.communicate()


def ended(process):
    """Return the exit code and what was said, once every process has ended: each holds the pipes open."""
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in out
    return process.returncode, err


@pytest.mark.parametrize(
    ("flags", "pattern", "said"),
    [
        (["cifar10", "--workers=2"], "runs/*/result.json", RUNS),
        (["imagenet", "--loaders=2", "--epochs=10000"], "runs/*/metrics.csv", NOTHING),
        (["theory", "--steps=1000000"], "config.json", NOTHING),
    ],
    ids=["two workers", "one worker, for which two processes read", "no runs"],
)
def test_ctrl_c_ends_all_processes_with_a_line_that_says_what_is_saved(flags, pattern, said, begin, tmp_path):
    process = begin("-m", "experiments", *flags, "--preset", "smoke", "--out", tmp_path)
    wait_for(process, tmp_path, pattern)
    interrupt(process)
    assert ended(process) == (130, said.format(out=tmp_path))


def test_ctrl_c_that_ends_the_reader_of_the_output_first_is_still_answered(begin, tmp_path):
    process = begin("-m", "experiments", "theory", "--steps=1000000", "--out", tmp_path)
    wait_for(process, tmp_path, "config.json")
    process.stdout.close()  # as by `| tee`, which Ctrl-C ends too
    interrupt(process)
    assert process.communicate(timeout=60)[1] == NOTHING
    assert process.returncode == 130


def test_ctrl_c_before_the_settings_are_known_is_told(begin_script):
    process = begin_script(WAITING)
    interrupt(process)
    assert ended(process) == (130, "Interrupted before it began.\n")


def test_ctrl_c_ends_a_process_that_measures(begin_script):
    process = begin_script(MEASURING)
    interrupt(process)
    assert ended(process) == (130, "Interrupted before it began.\n")


def test_a_second_ctrl_c_ends_at_once_what_never_comes_to_its_end(begin_script):
    process = begin_script(TIDYING)
    interrupt(process)
    assert process.stdout.readline() == "tidying\n"
    interrupt(process)
    assert ended(process) == (130, "\nInterrupted again: ended at once.\n")


def test_ctrl_c_where_no_exception_leaves_is_heard_a_moment_later(begin_script):
    process = begin_script(SWALLOWING)
    interrupt(process)
    assert ended(process) == (130, "Interrupted before it began.\n")


def test_what_runs_in_the_background_of_a_script_ignores_ctrl_c_as_shells_ask(begin_script):
    process = begin_script(IGNORING)
    interrupt(process)
    assert process.communicate("read to the end\n", timeout=60) == ("read to the end\n", "")
    assert process.returncode == 0


def test_what_is_kept_is_said_only_if_it_is_there(tmp_path):
    kept, config = COMMANDS["compare"].kept, Config(out=tmp_path)
    assert kept.said(config) + "\n" == NOTHING
    (tmp_path / "unrolled").mkdir()
    (tmp_path / "unrolled" / "checkpoint.pt").touch()
    assert kept.said(config).startswith(f"Interrupted. What was learned by unrolling is kept in {tmp_path}")
