"""The loop of learning over horizons: episodes cut into windows, a folder to look at and to go on from."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from metafop import tree
from metafop.fingerprint import fingerprint
from metafop.protocols import Batches
from metafop.run_folder import History, Notes, Run, RunFolder, Settings
from metafop.types import Meta, OuterLoss, Params, Progress
from metafop.unrolled import Unrolled, UnrolledState


class Task(Protocol):
    """What is trained, again and again: episodes, each of some windows.

    All depends on the numbers of these alone, and what is random is seeded by them: so a run can go on later.
    Its `repr` tells its settings, as that of a dataclass does: a folder is refused if it holds another's run.
    So is one where the start, the batches or the losses of episode 0's first window are others; for that,
    losses are also evaluated at parameters a little away from the start.
    What an estimator carries besides (`forward.init`, `evolution.init`) is for `start` to return.
    """

    def start(self, episode: int) -> Any:
        """Return the carry that an `episode` starts from; the first is 0."""
        ...

    def batches(self, episode: int, window: int) -> Batches:
        """Return the batches of a `window` of an `episode`, one for each step; the first window is 0."""
        ...

    def outer_loss(self, episode: int, window: int) -> OuterLoss:
        """Return the outer loss of a `window` of an `episode`, a function of the carry after it."""
        ...


class Trained(NamedTuple):
    """How a run ended.

    state: that after the last step; what was learned is `state.meta`.
    history: a row for each step, with every scalar of its info and, as they were before it, the numbers that
        are learned: of a schedule the mean, of a matrix the norm.
    notes: the sentences that the estimator noted, each with the step that said it first.
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
    start: Params | tuple[()] = (),
    windows: int = 1,
    folder: str | Path | None = None,
    save_every: int = 10,
    progress: Progress | None = None,
) -> Trained:
    """Learn meta: a step for each window, an episode of `windows`, each of which starts where the last ended.

    learner: what learns, and by which estimator.
    outer_meta: its hyperparameters, from `learner.init_meta`.
    meta: where learning starts, from `training.init_meta`.
    task: what is trained, again and again.
    steps: how many steps of meta to take in all, those of an interrupted run included.
    start: the parameters from which episodes start, where the learner learns them (`()`).
    windows: how many of them an episode has (1).
    folder: where a checkpoint is kept, and events, which TensorBoard shows: numbers by name, schedules as
        curves (None, nothing is kept). Called again with it, an interrupted run goes on from there and ends,
        bit for bit, as if it had not been. Refused are a run with other settings, losses or data, as far as
        they differ in the first window of episode 0; a folder that another process writes to; and a file that
        is damaged or holds more than data. A state may hold dicts, lists, tuples and NamedTuples of tensors.
    save_every: after how many steps a checkpoint is written, besides the one in the end (10).
    progress: called after each step with a sentence, how many are done, and how many there are, such as
        `metafop.progress.Line()` (None).

    Ctrl-C saves what is done, says so in one line, and leaves Python by SystemExit.

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
    >>> trained = meta_train(learner, outer_meta, meta, Slope(), steps=40)
    >>> trained.history[0]["value"] > 0.8, trained.history[-1]["value"] < 1e-3
    (True, True)
    """
    for name, number in (("steps", steps), ("windows", windows), ("save_every", save_every)):
        if number < 1:
            raise ValueError(f"meta_train takes {name} of one or more, got {number}. Pass a positive number.")
    if start and windows > 1:
        raise ValueError(
            f"meta_train learns the start of episodes and got windows={windows}, of which only the first "
            "starts there. Pass windows=1."
        )
    opened = nullcontext() if folder is None else RunFolder(folder)
    with opened as kept:
        run = Run(learner.init(meta, start), [], {})
        try:
            if kept is not None:
                new = run._replace(state=run.state._replace(carry=task.start(0)))
                run = kept.load(
                    new, _settings(learner, outer_meta, meta, start, task, windows, new.state.carry)
                )
            _check_length(run, steps, folder)
            for i in range(len(run.history), steps):
                run = _stepped(learner, outer_meta, task, run, *divmod(i, windows))
                if progress is not None:
                    progress(f"outer loss {run.history[-1]['value']:.4g}", i + 1, steps)
                if kept is not None and ((i + 1) % save_every == 0 or i + 1 == steps):
                    kept.save(run, learner.learned_leaves(run.state))
        except KeyboardInterrupt:
            _leave(learner, run, kept, steps)
    return Trained(run.state, run.history, run.notes)


def _check_length(run: Run, steps: int, folder: str | Path | None) -> None:
    if len(run.history) > steps:
        raise ValueError(
            f"{folder} holds a run of {len(run.history)} steps, more than steps={steps}. "
            "Pass another folder, or as many steps."
        )


def _leave(learner: Unrolled, run: Run, kept: RunFolder | None, steps: int) -> NoReturn:
    """Save what is done, say so, and exit as a program does that Ctrl-C ended."""
    done = f"Interrupted after {len(run.history)} of {steps} steps."
    if kept is None:
        sys.stderr.write(f"\n{done} Nothing is saved: pass a folder to go on from there next time.\n")
    elif not run.history:
        sys.stderr.write(f"\n{done} What {kept.path} holds is as it was.\n")
    else:
        kept.save(run, learner.learned_leaves(run.state))
        sys.stderr.write(f"\n{done} They are saved in {kept.path}: the same call goes on from there.\n")
    raise SystemExit(130) from None


def _stepped(learner: Unrolled, outer_meta: Meta, task: Task, run: Run, episode: int, window: int) -> Run:
    carry = task.start(episode) if window == 0 else run.state.carry
    batches, outer_loss = task.batches(episode, window), task.outer_loss(episode, window)
    state, info = learner.step(outer_meta, run.state, outer_loss, carry, batches)
    scalars = {k: x for k, x in info.items() if isinstance(x, Tensor) and x.numel() == 1}
    row = {k: float(x) for k, x in (_numbers(learner, run.state) | scalars).items()}
    said = dict.fromkeys(info["notes"], len(run.history))
    return Run(state, [*run.history, row], said | run.notes)


def _numbers(learner: Unrolled, state: UnrolledState) -> dict[str, Tensor]:
    """Return what is learned as scalars."""
    numbers = {}
    for name, leaf in learner.learned_leaves(state).items():
        if leaf.dim() == 0:
            numbers[name] = leaf
        elif name.startswith("hyper."):
            numbers[f"{name}.mean"] = leaf.mean()
        else:
            numbers[f"{name}.norm"] = torch.linalg.vector_norm(leaf)
    return numbers


def _settings(
    learner: Unrolled,
    outer_meta: Meta,
    meta: Meta,
    start: Params | tuple[()],
    task: Task,
    windows: int,
    carry: Any,
) -> Settings:
    """Return what tells this run from others: as it prints, and by what the training of episode 0 sees."""
    printed = {"learner": _printed(learner), "task": _printed(task), "windows": _printed(windows)}
    tensors = {"outer_meta": tree.named(outer_meta), "meta": tree.named(meta)}
    if start:
        tensors["start"] = start
    window = (task.batches(0, 0), task.outer_loss(0, 0))
    return [printed | tensors, *fingerprint(learner.training, meta, carry, *window)]


def _printed(setting: object) -> str:
    """Return how Python prints it, without addresses: in another process they are others."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(setting))
