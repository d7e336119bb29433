"""A folder that keeps a run: for one process at a time, in whole files, of which nothing is read but data."""

import io
import os
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, NamedTuple, Self
from uuid import uuid4
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from metafop import tree
from metafop.fingerprint import same
from metafop.log import logger
from metafop.unrolled import UnrolledState

History = list[dict[str, float]]  # a row for each step
Notes = dict[str, int]  # each sentence with the step that said it first
Settings = list[dict[str, Any]]  # text, tensors or numbers by name; each dict follows from those before

_FORMAT = "meta_train 3"


class Run(NamedTuple):
    """What a run goes on from; the carry is in the state."""

    state: UnrolledState
    history: History
    notes: Notes


class RunFolder:
    """Keeps a run: a checkpoint to go on from, and events for TensorBoard. Locked while it is open."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoint = self.path / "checkpoint.pt"
        self._lock: Any = None
        self._settings: Settings = []
        self._events: Any = None  # a Logger, once there is something to write
        self._logged = 0

    def __enter__(self) -> Self:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"meta_train takes a folder, got the file {self.path}. Pass another path.")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.path)
        for part in self.path.glob("checkpoint.*.part"):  # of processes that were killed
            part.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._events is not None:
                self._events.close()
        finally:
            self._lock.release()

    def load(self, new: Run, settings: Settings) -> Run:
        """Return the run that is kept here, or `new` if none is. Refuse one with other settings."""
        self._settings = settings
        try:
            file = self.checkpoint.open("rb")
        except FileNotFoundError:
            self._check_can_keep(new)
            return new
        with file:
            run = self._checked(self._read(file, new))
        if not _fits(run.state, new.state):
            raise ValueError(self._foreign("its state has another structure"))
        self._logged = len(run.history)
        return run

    def save(self, run: Run, learned: Mapping[str, Tensor]) -> None:
        """Write a checkpoint and, for TensorBoard, what has come since the last one."""
        part = self.path / f"checkpoint.{uuid4().hex}.part"
        try:
            with part.open("xb") as file:
                torch.save({"format": _FORMAT, "settings": self._settings, **run._asdict()}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.checkpoint)  # whole, or not at all
        finally:
            part.unlink(missing_ok=True)
        _sync(self.path)
        # Events come last: those of a step that is not in the checkpoint would be written twice.
        self._events = self._events or _events(self.path)
        for step in range(self._logged, len(run.history)):
            self._events.info(step, {name: torch.tensor(x) for name, x in run.history[step].items()})
        self._events.learned(len(run.history), learned)
        self._events.flush()
        self._logged = len(run.history)

    def _check_can_keep(self, new: Run) -> None:
        """Refuse now what could not be loaded later, such as an object of a class of its own."""
        file = io.BytesIO()
        try:
            torch.save(
                tree.map(lambda x: x.new_empty(0) if isinstance(x, Tensor) else x, new._asdict()), file
            )
            _load(file, new)
        except Exception as error:
            raise ValueError(
                f"{self.path} cannot keep this run, whose state is more than dicts, lists, tuples "
                f"and NamedTuples of tensors ({_said(error)}). Define their classes at the top level of a "
                "module, name those that you trust to torch.serialization.add_safe_globals, or pass "
                "folder=None."
            ) from error

    def _read(self, file: IO[bytes], new: Run) -> Any:
        try:
            damaged = ZipFile(file).testzip()  # torch does not look at the checksums that it writes
            if damaged is not None:
                raise BadZipFile(f"{damaged} does not match its checksum")
            return _load(file, new)
        except Exception as error:  # a damaged file can make torch's reader raise anything
            raise ValueError(self._foreign(_said(error))) from error

    def _checked(self, content: Any) -> Run:
        match content:
            case {
                "format": str(form),
                "settings": [dict(), dict(), dict()] as settings,
                "state": state,
                "history": list(history),
                "notes": dict(notes),
            } if form == _FORMAT and all(isinstance(row, dict) for row in history):
                self._check_settings(list(settings))
                return Run(state, history, notes)
        raise ValueError(self._foreign("it holds something else"))

    def _check_settings(self, kept: Settings) -> None:
        for ours, theirs in zip(self._settings, kept, strict=True):
            others = [name for name, value in ours.items() if not _same(value, theirs.get(name))]
            if others:
                raise ValueError(
                    f"{self.path} holds a run that differs in {' and '.join(others)}. "
                    "Pass another folder, or the settings of that run."
                )

    def _foreign(self, reason: str) -> str:
        return (
            f"{self.checkpoint} is damaged, or was not written by this version of meta_train ({reason}). "
            "Move it away to start anew, or pass another folder."
        )


def _locked(folder: Path) -> Any:
    """Return a lock of the folder that this process holds."""
    from filelock import FileLock, Timeout  # torch needs it too, so it is there

    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RuntimeError(
            f"{folder} is in use by another meta_train. Wait for it, end it, or pass another folder."
        ) from None
    return lock


def _events(folder: Path) -> Any:
    """Return what writes events or, where TensorBoard is not installed, what says so and writes none."""
    try:
        from metafop.tensorboard import Logger
    except ImportError as error:
        logger.info("no events are written to %s: %s", folder, error)
        return _NoEvents()
    return Logger(folder)


class _NoEvents:
    def info(self, step: int, info: Any) -> None: ...

    def learned(self, step: int, leaves: Any) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _load(file: IO[bytes], new: Run) -> Any:
    """Return what torch.save wrote if it is plain data and NamedTuples, the library's or those of `new`."""
    # Not those that are safe already: the context makes all that it is given unsafe when it ends.
    added = _namedtuples(new) - set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals(list(added)):
        file.seek(0)
        unsafe = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        if unsafe:
            raise UnpicklingError(f"it names {', '.join(unsafe)}, and this is not data")
        file.seek(0)
        return torch.load(file, weights_only=True)


def _namedtuples(x: Any) -> set[Any]:
    """Return the NamedTuple classes in a tree; not those derived from one, which may run their own code."""
    inside = x.values() if isinstance(x, dict) else x if isinstance(x, tuple | list) else ()
    own = {type(x)} if _fields(x) and type(x).__bases__[0] is tuple else set()
    return own.union(*(_namedtuples(child) for child in inside))


def _fields(x: Any) -> tuple[str, ...]:
    return getattr(x, "_fields", ()) if isinstance(x, tuple) else ()


def _fits(x: Any, start: Any) -> bool:
    """Return whether x has the structure of what it started as; what was empty may have been filled."""
    if isinstance(start, dict):
        return isinstance(x, dict) and (
            not start or (x.keys() == start.keys() and all(_fits(x[k], start[k]) for k in start))
        )
    if isinstance(start, tuple | list):
        return not start or (
            isinstance(x, tuple | list)
            and (_fields(x), len(x)) == (_fields(start), len(start))
            and all(map(_fits, x, start))
        )
    return isinstance(x, Tensor) == isinstance(start, Tensor)


def _same(x: Any, y: Any) -> bool:
    """Return whether two settings are the same: text, tensors by name, or numbers but for rounding."""
    if not isinstance(x, dict):
        return x == y
    if not all(isinstance(leaf, Tensor) for leaf in x.values()):
        return same(x, y)
    return (
        isinstance(y, dict)
        and x.keys() == y.keys()
        and all(isinstance(y[k], Tensor) and x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in x)
    )


def _said(error: Exception) -> str:
    """Return the first sentence of an error: torch's go on for pages."""
    first = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _sync(folder: Path) -> None:
    if os.name == "nt":  # Windows opens no folders
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
