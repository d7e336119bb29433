"""Many runs: finished ones are not run again, the others side by side on the cores, with progress."""

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from experiments.reporting.summary import RUNS_USED
from experiments.runner import runs
from experiments.runner.experiment import made_by
from experiments.runner.progress import ProgressBoard
from experiments.runner.runs import Finished, Task

WORKERS = (
    1 if torch.cuda.is_available() else os.cpu_count() or 1
)  # by default: one for each core, or one for an accelerator


def carry_out(tasks: Sequence[Task], out: Path, workers: int, threads: int = 1) -> list[Finished]:
    """Return the finished runs of all tasks, in their order, after running those that are not.

    With one worker they run in this process. A run that fails leaves `error.txt` in its folder; the others
    continue.
    """
    if workers < 1:
        raise SystemExit(f"A study needs a worker, got --workers {workers}. Pass 1 or more.")
    waiting = list(dict.fromkeys(task for task in tasks if runs.finished(task, out) is None))
    with ProgressBoard(tasks, waiting) as board:
        if workers == 1 or len(waiting) < 2:
            torch.set_num_threads(threads)
            for task in waiting:
                board.begun(task)
                board.ended(task, _run_one(task, out, lambda epochs, task=task: board.moved(task, epochs)))
        else:
            _run_side_by_side(waiting, out, min(workers, len(waiting)), threads, board)
    found = [runs.finished(task, out) for task in tasks]
    undone = [str(runs.folder_of(task, out)) for task, one in zip(tasks, found, strict=True) if one is None]
    if undone:
        raise SystemExit(
            f"{len(undone)} of {len(tasks)} runs are not done; the reason is above, and in error.txt in "
            f"{', '.join(undone[:3])}{' and others' if len(undone) > 3 else ''}. The same command resumes."
        )
    finished = [one for one in found if one is not None]
    with (out / RUNS_USED).open("a") as file:
        file.writelines(f"{one.folder.name}\n" for one in finished)
    _warn_of_other_versions(finished)
    return finished


def _run_one(task: Task, out: Path, tick: Callable[[float], None]) -> Finished | str:
    """Carry out one run, or return why it failed."""
    try:
        finished = runs.carry_out(task, out, tick)
    except runs.InUse as error:
        return str(error)
    except (Exception, SystemExit) as error:
        _write_error(task, out, traceback.format_exc())
        said = str(error).strip() or repr(error)
        return f"FAILED: {said.splitlines()[-1]}"  # of an error in another process, its traceback comes first
    (finished.folder / "error.txt").unlink(missing_ok=True)
    return finished


def _write_error(task: Task, out: Path, why: str) -> None:
    folder = runs.folder_of(task, out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "error.txt").write_text(why)


def _work(connection: Connection, out: Path, threads: int) -> None:
    """In a worker process: run each task that is sent, and report its progress, until None is sent."""
    torch.set_num_threads(threads)

    def report(message: Any) -> None:
        try:
            connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)  # the study has ended: checkpoints hold all but the last seconds

    try:
        while (task := connection.recv()) is not None:
            report(_run_one(task, out, report))
    except (EOFError, ConnectionResetError, KeyboardInterrupt):
        os._exit(1)


class _Worker(NamedTuple):
    process: SpawnProcess
    connection: Connection


def _run_side_by_side(
    waiting: Sequence[Task], out: Path, workers: int, threads: int, board: ProgressBoard
) -> None:
    queue, at_work = list(waiting), dict[Any, tuple[_Worker, Task]]()
    with _workers_of_this_study() as begin:
        for _ in range(workers):
            _give_next(begin(out, threads), queue, at_work, board)
        while at_work:
            for ready in wait(list(at_work)):
                worker, task = at_work[ready]
                try:
                    message = worker.connection.recv()
                except (EOFError, ConnectionResetError):  # the run can be resumed later; the study continues
                    del at_work[ready]
                    worker.process.join()
                    why = f"FAILED: its process ended with exit code {worker.process.exitcode}"
                    _write_error(
                        task, out, f"{why}; that of one that is killed, as when memory is short, is -9.\n"
                    )
                    board.ended(task, why)
                    _give_next(begin(out, threads), queue, at_work, board)
                    continue
                if isinstance(message, float | int):
                    board.moved(task, message)
                else:
                    del at_work[ready]
                    board.ended(task, message)
                    _give_next(worker, queue, at_work, board)


def _give_next(
    worker: _Worker, queue: list[Task], at_work: dict[Any, tuple[_Worker, Task]], board: ProgressBoard
) -> None:
    """Give a worker its next task, or tell it to stop."""
    if queue:
        at_work[worker.connection] = (worker, queue[0])
        board.begun(queue[0])
        worker.connection.send(queue.pop(0))
    else:
        worker.connection.send(None)


@contextmanager
def _workers_of_this_study() -> Iterator[Callable[[Path, int], _Worker]]:
    """Give a function that starts a worker; all of them have ended when the block is left."""
    context, begun = multiprocessing.get_context("spawn"), list[_Worker]()

    def begin(out: Path, threads: int) -> _Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, out, threads))
        process.start()
        theirs.close()  # so that we see when the process is gone
        begun.append(_Worker(process, ours))
        return begun[-1]

    try:
        yield begin
    except BaseException:
        for worker in begun:
            worker.process.terminate()
        raise
    finally:
        for worker in begun:
            worker.process.join()


def _warn_of_other_versions(finished: Sequence[Finished]) -> None:
    """Warn if runs, or parts of them, were made by another commit, version or machine than this one."""
    here = made_by()
    made = [json.loads((one.folder / "config.json").read_text())["parts"] for one in finished]
    others = [[part for part in parts if {k: part[k] for k in here} != here] for parts in made]
    commits = sorted({str(part["commit"]) for parts in others for part in parts})
    if commits:
        count = sum(bool(parts) for parts in others)
        Console(stderr=True).print(
            f"{count} of {len(finished)} runs were made earlier or elsewhere, by {', '.join(commits)}; this "
            f"is {here['commit']}. To run them again, delete their folders or pass another --out.",
            highlight=False,
            soft_wrap=True,
        )
