"""The loop of learning over horizons: episodes cut into windows, a folder to look at and to go on from."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from metafop import tree
from metafop.fingerprint import fingerprint
from metafop.run_folder import History, Notes, Run, RunFolder, Settings
from metafop.types import Batches, Meta, OuterLoss
from metafop.unrolled import Unrolled, UnrolledState

try:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as error:
    raise ImportError(
        'metafop.meta_training needs rich, which is not installed: pip install "metafop[experiments]".'
    ) from error


class Task(Protocol):
    """What is trained, again and again: episodes, each of some windows.

    All depends on the numbers of these alone, and what is random is seeded by them: so a run can go on later.
    Its `repr` tells its settings, as that of a dataclass does: a folder is refused if it holds another's run.
    So is one where the start, the batches or the losses of episode 0's first window are others; for that,
    losses are also evaluated at parameters a little away from the start.
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


def meta_train(
    learner: Unrolled,
    outer_meta: Meta,
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
    had not been. Refused are a run with other settings, losses or data, as far as they differ in the first
    window of episode 0; a folder that another process writes to; and a file that is damaged or holds more
    than data. A state or carry may hold dicts, lists, tuples and NamedTuples of tensors.

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
    >>> learner, meta = Unrolled(training, Adam()), training.init_meta(params, lr=0.01)
    >>> outer_meta = learner.init_meta(meta, lr=0.1)
    >>> trained = meta_train(learner, outer_meta, meta, Slope(), steps=40, progress=False)
    >>> trained.history[0]["value"] > 0.8, trained.history[-1]["value"] < 1e-3
    (True, True)
    """
    for name, number in (("steps", steps), ("windows", windows), ("save_every", save_every)):
        if number < 1:
            raise ValueError(f"meta_train takes {name} of one or more, got {number}. Pass a positive number.")
    opened = nullcontext() if folder is None else RunFolder(folder)
    with opened as kept, _bar(progress) as bar:
        run = Run(learner.init(meta), None if kept is None else task.start(0), [], {})
        if kept is not None:
            run = kept.load(run, _settings(learner, outer_meta, meta, task, windows, run.carry))
        done = len(run.history)
        if done > steps:
            raise ValueError(
                f"{folder} holds a run of {done} steps, more than steps={steps}. "
                "Pass another folder, or as many steps."
            )
        shown = bar.add_task("", total=steps, completed=done, value="")
        for i in range(done, steps):
            run = _stepped(learner, outer_meta, task, run, *divmod(i, windows))
            bar.update(shown, completed=i + 1, value=f"{run.history[-1]['value']:.4g}")
            if kept is not None and ((i + 1) % save_every == 0 or i + 1 == steps):
                kept.save(run)
    return Trained(run.state, run.history, run.notes)


def _stepped(learner: Unrolled, outer_meta: Meta, task: Task, run: Run, episode: int, window: int) -> Run:
    carry = task.start(episode) if window == 0 else run.carry
    batches, outer_loss = task.batches(episode, window), task.outer_loss(episode, window)
    state, info = learner.step(outer_meta, run.state, outer_loss, carry, batches)
    scalars = {k: x for k, x in info.items() if isinstance(x, Tensor) and x.numel() == 1}
    row = {k: float(x) for k, x in (_numbers(learner, run.state.meta) | scalars).items()}
    said = dict.fromkeys(info["notes"], len(run.history))
    return Run(state, state.carry, [*run.history, row], said | run.notes)


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


def _settings(
    learner: Unrolled, outer_meta: Meta, meta: Meta, task: Task, windows: int, start: Any
) -> Settings:
    """Return what tells this run from others: as it prints, and by what the training of episode 0 sees."""
    printed = {"learner": _printed(learner), "task": _printed(task), "windows": _printed(windows)}
    tensors = {"outer_meta": tree.named(outer_meta), "meta": tree.named(meta)}
    window = (task.batches(0, 0), task.outer_loss(0, 0))
    return [printed | tensors, *fingerprint(learner.training, meta, start, *window)]


def _printed(setting: object) -> str:
    """Return how Python prints it, without addresses: in another process they are others."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(setting))
