"""Progress bars: of the steps of an experiment, and of the runs of a study."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.runner.runs import Finished, Task


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Give a function to call with what is done next, `total` times; the bar is gone in the end."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


class ProgressBoard:
    """Shows how many runs and epochs are done, and the time that is left; a line for each run that ends."""

    def __init__(self, tasks: Sequence[Task], waiting: Sequence[Task]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
        self._bar = Progress(*columns, TimeRemainingColumn(), speed_estimate_period=600, transient=True)
        self._epochs = {id(task): 0.0 for task in waiting}
        self._began = {id(task): 0.0 for task in waiting}
        self._runs, self._total = len(tasks), sum(task.epochs for task in waiting)
        self._left = len(waiting)
        self._task: TaskID = self._bar.add_task("", total=self._total)

    def __enter__(self) -> Self:
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

    def ended(self, task: Task, one: Finished | str) -> None:
        self._left -= 1
        self._epochs[id(task)] = task.epochs
        seconds = time.monotonic() - self._began[id(task)]
        outcome = one if isinstance(one, str) else _figures(one)
        self._bar.console.print(f"{task.name}: {outcome} ({seconds:.0f} s)", highlight=False, soft_wrap=True)
        self._show()

    def _show(self) -> None:
        done = sum(self._epochs.values())
        text = f"{self._runs - self._left} of {self._runs} runs, {done:.1f} of {self._total} epochs"
        self._bar.update(self._task, completed=done, description=text)


def _figures(one: Finished) -> str:
    figures = {k: v for k, v in one.result.items() if isinstance(v, float) and k != "seconds"}
    figures_text = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items()]
    return ", ".join([*(name.upper() for name, value in one.result.items() if value is True), *figures_text])
