"""The loop of learning over horizons: episodes cut into windows, a folder to look at and to go on from."""

import os
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from metafop import tree
from metafop.tensorboard import Logger
from metafop.types import Batches, Meta, OuterLoss
from metafop.unrolled import Unrolled, UnrolledState

try:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as error:
    raise ImportError(
        'metafop.meta_training needs rich, which is not installed: pip install "metafop[experiments]".'
    ) from error

History = list[dict[str, float]]  # a row for each step
Notes = dict[str, int]  # each sentence with the step that said it first


class Task(Protocol):
    """What is trained, again and again: episodes, each of some windows.

    All depends on the numbers of these alone, and what is random is seeded by them: so a run can go on later.
    Its `repr` tells its settings, as that of a dataclass does: a folder is refused if it holds another's run.
    What an estimator carries besides (`forward.init`, `evolution.init`) is for `start` to return.
    """

    def start(self, episode: int) -> Any:
        """Return the carry that an episode starts from."""
        ...

    def batches(self, episode: int, window: int) -> Batches: ...

    def outer_loss(self, episode: int, window: int) -> OuterLoss: ...


class Trained(NamedTuple):
    """How a run ended.

    A row of `history` has every scalar of a step's info and, as they were before it, the numbers that are
    learned: of a schedule the mean, of a matrix the norm. `notes` are the estimator's.
    """

    state: UnrolledState
    history: History
    notes: Notes


class _Run(NamedTuple):
    """What a run goes on from."""

    state: UnrolledState
    carry: Any
    history: History
    notes: Notes


def meta_train(
    learner: Unrolled,
    steer: Meta,
    meta: Meta,
    task: Task,
    steps: int,
    *,
    windows: int = 1,
    folder: str | Path | None = None,
    save_every: int = 10,
    progress: bool = True,
) -> Trained:
    """Learn meta: a step for each window, an episode of `windows`, each of which starts where the last ended.

    A `folder` is for events, which TensorBoard shows, and a checkpoint, written every `save_every` steps and
    at the end. Called again with it, an interrupted run goes on from there and ends, bit for bit, as if it
    had not been; a run with other settings is refused. A checkpoint is a pickle, which may run any code when
    it is read: name no folder that you do not trust.

    >>> from metafop.meta_training import meta_train
    >>> from metafop.unrolled import Unrolled
    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> class Slope:
    ...     def start(self, episode):
    ...         return training.init(params)
    ...     def batches(self, episode, window):
    ...         return 5 * [torch.ones(1)]
    ...     def outer_loss(self, episode, window):
    ...         return lambda carry: (carry.params["w"] - 1).square().sum()
    >>> learner, meta = Unrolled(training, Adam()), training.meta(params, SGD().hyper(lr=0.01))
    >>> steer = learner.meta(meta, Adam().hyper(lr=0.1))
    >>> trained = meta_train(learner, steer, meta, Slope(), steps=40, progress=False)
    >>> trained.history[0]["value"] > 0.8, trained.history[-1]["value"] < 1e-3
    (True, True)
    """
    for name, number in (("steps", steps), ("windows", windows), ("save_every", save_every)):
        if number < 1:
            raise ValueError(f"meta_train takes {name} of one or more, got {number}. Pass a positive number.")
    settings = {"learner": learner, "task": task, "windows": windows, "steer": steer, "meta": meta}
    with _Folder(folder, settings) as kept, _bar(progress) as bar:
        run = kept.load(steps) or _Run(learner.init(meta), None, [], {})
        done = len(run.history)
        shown = bar.add_task("", total=steps, completed=done, value="")
        for i in range(done, steps):
            run = _stepped(learner, steer, task, run, *divmod(i, windows))
            bar.update(shown, completed=i + 1, value=f"{run.history[-1]['value']:.4g}")
            if (i + 1) % save_every == 0 or i + 1 == steps:
                kept.save(run)
    return Trained(run.state, run.history, run.notes)


def _stepped(learner: Unrolled, steer: Meta, task: Task, run: _Run, episode: int, window: int) -> _Run:
    carry = task.start(episode) if window == 0 else run.carry
    batches, outer_loss = task.batches(episode, window), task.outer_loss(episode, window)
    state, carry, info = learner.step(steer, run.state, outer_loss, carry, batches)
    scalars = {k: x for k, x in info.items() if isinstance(x, Tensor) and x.numel() == 1}
    row = {k: float(x) for k, x in (_numbers(learner, run.state.meta) | scalars).items()}
    said = dict.fromkeys(info["notes"], len(run.history))
    return _Run(state, carry, [*run.history, row], said | run.notes)


def _numbers(learner: Unrolled, meta: Meta) -> dict[str, Tensor]:
    """Return what is learned as scalars."""
    numbers = {}
    for name, leaf in learner.learned.of(meta).items():
        if leaf.dim() == 0:
            numbers[name] = leaf
        elif name.startswith("hyper."):
            numbers[f"{name}.mean"] = leaf.mean()
        else:
            numbers[f"{name}.norm"] = torch.linalg.vector_norm(leaf)
    return numbers


def _bar(progress: bool) -> Progress:
    return Progress(
        TextColumn("outer loss {task.fields[value]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        transient=True,
        disable=not progress,
    )


def _comparable(setting: Any) -> Any:
    """Return the tensors of a meta by name, and of all else how Python prints it.

    Without addresses: in another process they are others.
    """
    if isinstance(setting, Meta):
        return tree.named(setting)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(setting))


class _Folder:
    """Keeps a run: a checkpoint to go on from, and the history for TensorBoard. Without a path, nothing."""

    def __init__(self, path: str | Path | None, settings: dict[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.settings = {} if path is None else {name: _comparable(x) for name, x in settings.items()}
        self.logger: Logger | None = None
        self.logged = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.logger is not None:
            self.logger.close()

    def load(self, steps: int) -> _Run | None:
        """Return the run that is kept here, if any, or refuse one with other settings."""
        if self.path is None or not (self.path / "checkpoint.pt").exists():
            return None
        try:
            settings, run = torch.load(self.path / "checkpoint.pt", weights_only=False)
        except (EOFError, RuntimeError, UnpicklingError) as error:
            raise ValueError(
                f"{self.path / 'checkpoint.pt'} is damaged, or was written by something else "
                f"({type(error).__name__}). Delete it to start anew, or pass another folder."
            ) from error
        others = [name for name, value in self.settings.items() if not _same(value, settings[name])]
        if others:
            raise ValueError(
                f"{self.path} holds a run that differs in {' and '.join(others)}. "
                "Pass another folder, or the settings of that run."
            )
        self.logged = len(run.history)
        if self.logged > steps:
            raise ValueError(
                f"{self.path} holds a run of {self.logged} steps, more than steps={steps}. "
                "Pass another folder, or as many steps."
            )
        return run

    def save(self, run: _Run) -> None:
        if self.path is None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        torch.save((self.settings, run), self.path / "unfinished.pt")
        os.replace(self.path / "unfinished.pt", self.path / "checkpoint.pt")  # whole, or not at all
        # Events come last: those of a step that is not in the checkpoint would be written twice.
        self.logger = self.logger or Logger(self.path)
        for step in range(self.logged, len(run.history)):
            self.logger.info(step, {name: torch.tensor(x) for name, x in run.history[step].items()})
        self.logged = len(run.history)


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, dict):
        return x == y
    return x.keys() == y.keys() and all(x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in x)
