"""Runs in processes of their own, to be killed and begun again."""

import json
import multiprocessing
import signal
from itertools import count
from random import Random

import torch

from experiments.runner import runs
from experiments.vision import loop

KILLS = 10
PRELOADED = [  # imported once, by the process that all others are forked from
    "pytest",
    "experiments.vision.task",
    "experiments.runner.study",
    "experiments.paper.bipedal.training",
]


def in_short_parts(task, out, connection):
    """Carry out a run that tells of every few steps, each time followed by a checkpoint: kills hit these too.

    After four of them it waits for leave to go on: however slow the test, it is not done before it is killed.
    """
    torch.set_num_threads(1)
    runs.CHECKPOINT_SECONDS, loop.STEPS_AT_ONCE = 0.0, 3
    told = count(1)

    def tick(epochs):
        connection.send(epochs)
        if next(told) == 4:
            connection.recv()

    runs.carry_out(task, out, tick)


def begun(task, out):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=in_short_parts, args=(task, out, theirs))
    process.start()
    theirs.close()
    return process, ours


def finish(task, out):
    process, connection = begun(task, out)
    connection.send("leave")
    while process.is_alive():
        if connection.poll(1):
            try:
                connection.recv()
            except (EOFError, ConnectionResetError):  # it has ended, its leave perhaps unread
                break
    process.join()
    assert process.exitcode == 0


def kill_on_the_way(task, out):
    """Begin a run, and kill it after it has told of its steps three times, all in its checkpoint."""
    process, connection = begun(task, out)
    for _ in range(4):
        connection.recv()
    process.kill()
    process.join()


def assert_kills_change_no_bit(task, out):
    """Kill a run at ten random moments, and compare what it leaves with what an undisturbed one leaves."""
    random, reached = Random(0), []
    for _ in range(KILLS):
        process, connection = begun(task, out / "killed")
        reached.append(connection.recv())
        for _ in range(random.randrange(4)):
            connection.recv()
        connection.poll(random.uniform(0, 0.03))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    finish(task, out / "killed")
    finish(task, out / "whole")
    assert 0 < max(reached) < task.epochs, (
        "it went on from checkpoints, and was not done before the last kill"
    )
    assert_same_bits(task, out / "whole", out / "killed")


def left_by(task, out):
    """Everything that a run leaves, but how long it took: figures, metrics, weights, matrices."""
    folder = runs.folder_of(task, out)
    result = json.loads((folder / "result.json").read_text())
    figures = {name: value for name, value in result.items() if "second" not in name}
    kept = [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))]
    return figures, (folder / "metrics.csv").read_text(), kept


def assert_same_bits(task, one, other):
    left, right = left_by(task, one), left_by(task, other)
    assert left[:2] == right[:2]
    torch.testing.assert_close(left[2], right[2], rtol=0, atol=0)
