"""Many runs: finished ones are not run again, the others side by side on the cores, with progress."""

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments import run, runs
from experiments.runs import Finished, Task


def carry_out(tasks: Sequence[Task], out: Path, workers: int, threads: int = 1) -> list[Finished]:
    """Return the finished runs of all tasks, in their order, after running those that are not.

    One worker works in this process. A run that fails leaves `error.txt` in its folder, and the others go on.
    """
    waiting = [task for task in tasks if runs.finished(task, out) is None]
    with _Board(tasks, waiting) as board:
        if workers == 1 or len(waiting) < 2:
            torch.set_num_threads(threads)
            for task in waiting:
                board.begun(task)
                board.ended(task, _one(task, out, lambda epochs, task=task: board.moved(task, epochs)))
        else:
            _side_by_side(waiting, out, min(workers, len(waiting)), threads, board)
    found = [runs.finished(task, out) for task in tasks]
    failed = [str(runs.folder_of(task, out)) for task, one in zip(tasks, found, strict=True) if one is None]
    if failed:
        raise SystemExit(
            f"{len(failed)} of {len(tasks)} runs failed; why is in error.txt in {', '.join(failed[:3])}"
            f"{' and others' if len(failed) > 3 else ''}. The same command goes on with them."
        )
    finished = [one for one in found if one is not None]
    _warn_of_others(finished)
    return finished


def _one(task: Task, out: Path, tick: Callable[[float], None]) -> Finished | None:
    """Carry out one run; None if it failed."""
    try:
        finished = runs.carry_out(task, out, tick)
    except BrokenPipeError:  # whoever asked for it is gone
        raise
    except Exception:
        _note(task, out, traceback.format_exc())
        return None
    (finished.folder / "error.txt").unlink(missing_ok=True)
    return finished


def _note(task: Task, out: Path, why: str) -> None:
    folder = runs.folder_of(task, out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "error.txt").write_text(why)


def _work(connection: Connection, out: Path, threads: int) -> None:
    """In a process of its own: run what is sent, and tell how far it is, until told to stop, or alone."""
    torch.set_num_threads(threads)
    try:
        while (task := connection.recv()) is not None:
            connection.send(_one(task, out, connection.send))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        os._exit(1)  # the study has ended: checkpoints hold all but the last seconds


class _Worker(NamedTuple):
    process: SpawnProcess
    connection: Connection


def _side_by_side(waiting: Sequence[Task], out: Path, workers: int, threads: int, board: "_Board") -> None:
    queue, at_work = list(waiting), dict[Connection, tuple[_Worker, Task]]()
    with _ended_with_us() as begin:
        for _ in range(workers):
            _next(begin(out, threads), queue, at_work, board)
        while at_work:
            for ready in wait(list(at_work)):
                assert isinstance(ready, Connection)
                worker, task = at_work[ready]
                try:
                    message = ready.recv()
                except (EOFError, ConnectionResetError):  # killed: the run can go on later, the study at once
                    del at_work[ready]
                    _note(task, out, "Its process was killed: memory may have been short.\n")
                    board.ended(task, None)
                    _next(begin(out, threads), queue, at_work, board)
                    continue
                if isinstance(message, float | int):
                    board.moved(task, message)
                else:
                    del at_work[ready]
                    board.ended(task, message)
                    _next(worker, queue, at_work, board)


def _next(
    worker: _Worker, queue: list[Task], at_work: dict[Connection, tuple[_Worker, Task]], board: "_Board"
) -> None:
    """Give a worker its next task, or let it go."""
    if queue:
        at_work[worker.connection] = (worker, queue[0])
        board.begun(queue[0])
        worker.connection.send(queue.pop(0))
    else:
        worker.connection.send(None)


@contextmanager
def _ended_with_us() -> Iterator[Callable[[Path, int], _Worker]]:
    """Give a function that begins a worker; none is left in the end."""
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


class _Board:
    """Shows how many runs and epochs are done, and the time that is left; a line for each run that ends."""

    def __init__(self, tasks: Sequence[Task], waiting: Sequence[Task]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
        self._bar = Progress(*columns, TimeRemainingColumn(), speed_estimate_period=600, transient=True)
        self._epochs = {id(task): 0.0 for task in waiting}
        self._began = {id(task): 0.0 for task in waiting}
        self._runs, self._total = len(tasks), sum(task.epochs for task in waiting)
        self._left = len(waiting)
        self._task: TaskID = self._bar.add_task("", total=self._total)

    def __enter__(self) -> "_Board":
        self._bar.start()
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begun(self, task: Task) -> None:
        self._began[id(task)] = time.monotonic()

    def moved(self, task: Task, epochs: float) -> None:
        self._epochs[id(task)] = epochs
        self._show()

    def ended(self, task: Task, one: Finished | None) -> None:
        self._left -= 1
        self._epochs[id(task)] = task.epochs
        seconds = time.monotonic() - self._began[id(task)]
        said = "FAILED" if one is None else _figures(one)
        self._bar.console.print(f"{task.name}: {said} ({seconds:.0f} s)", highlight=False, soft_wrap=True)
        self._show()

    def _show(self) -> None:
        done = sum(self._epochs.values())
        said = f"{self._runs - self._left} of {self._runs} runs, {done:.1f} of {self._total} epochs"
        self._bar.update(self._task, completed=done, description=said)


def _figures(one: Finished) -> str:
    figures = {k: v for k, v in one.result.items() if isinstance(v, float) and k != "seconds"}
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())


def _warn_of_others(finished: Sequence[Finished]) -> None:
    """Say so if runs were made by another commit or version than is here now."""
    here = {k: run.made_by()[k] for k in ("versions", "commit")}
    made = [json.loads((one.folder / "config.json").read_text()) for one in finished]
    others = [config for config in made if {k: config[k] for k in here} != here]
    if others:
        commits = sorted({str(config["commit"]) for config in others})
        Console(stderr=True).print(
            f"{len(others)} of {len(finished)} runs were made earlier, by {', '.join(commits)}; this is "
            f"{here['commit']}. To run them again, delete their folders or pass another --out.",
            highlight=False,
            soft_wrap=True,
        )
