"""One run and its folder: its settings, what it measures, and what it needs to resume if interrupted.

    config.json      the settings; and for each part, if it was interrupted, versions, commit and machine
    metrics.csv      a row for each step; cells are empty where nothing was measured
    events.out.…     the same for TensorBoard, and pictures of what was learned
    checkpoint.pt    the state to resume from; removed at the end
    result.json      the final figures: a folder that has it is finished

The checkpoint has the length of `metrics.csv`. A run that was killed resumes from there: rows beyond that
length are cut off and written again, with the same bits.
"""

import csv
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, Protocol

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from experiments.runner.experiment import made_by
from metafop.tensorboard import Logger

Row = Mapping[str, float]
CHECKPOINT_SECONDS = 20.0  # at least, between two checkpoints


class Process(Protocol):
    """A run in progress."""

    @property
    def columns(self) -> Sequence[str]:
        """What it measures; "step" is the first."""
        ...

    @property
    def epochs(self) -> float:
        """How many are done."""
        ...

    def advance(self, logger: Logger) -> list[Row]:
        """Take some steps, about a second's, and return what was measured; nothing if all are done."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def finish(self, folder: Path) -> dict[str, Any]:
        """Return the final figures; what is too large for them may be saved in the folder."""
        ...


class Task(Protocol):
    """The settings of a run, a frozen dataclass. Two runs are the same if their kind and all settings are.

    `kind` is part of the name of the run's folder. It never changes, wherever the class is moved to:
    otherwise finished runs would not be found again.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: ClassVar[str]

    @property
    def name(self) -> str: ...

    @property
    def epochs(self) -> int: ...

    def start(self) -> Process: ...


class InUse(RuntimeError):
    """Another process is writing this run."""


class Finished(NamedTuple):
    """A run that is done: its settings, its folder, and its final figures."""

    task: Any
    folder: Path
    result: dict[str, Any]

    def metrics(self) -> dict[str, Tensor]:
        """Return every column of `metrics.csv`, NaN where a cell is empty."""
        with (self.folder / "metrics.csv").open(newline="") as file:
            columns = list(zip(*csv.reader(file), strict=True))
        values = {column[0]: [float(cell or "nan") for cell in column[1:]] for column in columns}
        return {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}


def folder_of(task: Task, out: Path) -> Path:
    """Return the folder of a run, by its name and a hash of its kind and all settings: no two share one."""
    settings = json.dumps([task.kind, asdict(task)], sort_keys=True, default=str)
    return out / "runs" / f"{task.name}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


def finished(task: Task, out: Path) -> Finished | None:
    folder = folder_of(task, out)
    try:
        return Finished(task, folder, json.loads((folder / "result.json").read_text()))
    except (FileNotFoundError, json.JSONDecodeError):  # not there yet, or lost in a power failure
        return None


def carry_out(task: Task, out: Path, tick: Callable[[float], None]) -> Finished:
    """Run to the end, from the beginning or from the last checkpoint; `tick` gets the epochs done so far."""
    folder = folder_of(task, out)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            done = finished(task, out) or _carry_out(task, folder, tick)
            (folder / "checkpoint.pt").unlink(missing_ok=True)
            return done
    except Timeout:
        raise InUse(
            f"{folder} is being written by another process. Wait for it, or end it, then start again."
        ) from None


def _carry_out(task: Task, folder: Path, tick: Callable[[float], None]) -> Finished:
    process, checkpoint = task.start(), folder / "checkpoint.pt"
    saved: dict[str, Any] = {"length": 0, "seconds": 0.0, "step": None}
    if checkpoint.exists():
        saved = _loaded(checkpoint)
        process.load_state_dict(saved["process"])
    else:
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
    _write_config(task, folder, saved["step"])
    began, last_saved = time.monotonic() - saved["seconds"], time.monotonic()
    with (folder / "metrics.csv").open("a+", newline="") as file, Logger(folder, saved["step"]) as logger:
        file.truncate(saved["length"])
        rows = csv.DictWriter(file, process.columns)
        if not saved["length"]:
            rows.writeheader()
        tick(process.epochs)
        while measured := process.advance(logger):
            rows.writerows(measured)
            for row in measured:
                logger.info(int(row["step"]), {k: torch.tensor(v) for k, v in row.items() if k != "step"})
            if time.monotonic() - last_saved > CHECKPOINT_SECONDS:
                file.flush()
                os.fsync(file.fileno())
                logger.flush()
                state = {"length": file.tell(), "seconds": time.monotonic() - began}
                state |= {"step": int(measured[-1]["step"]) + 1, "process": process.state_dict()}
                save(checkpoint, state)
                last_saved = time.monotonic()
            tick(process.epochs)
        file.flush()
        os.fsync(file.fileno())
        result = process.finish(folder) | {"seconds": round(time.monotonic() - began, 1)}
        logger.hyperparameters(_flat(asdict(task)), {k: v for k, v in result.items() if isinstance(v, float)})
    _write(folder / "result.json", result)
    return Finished(task, folder, result)


def _loaded(checkpoint: Path) -> dict[str, Any]:
    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # of any type, if the file is damaged
        raise RuntimeError(f"{checkpoint} cannot be read. Delete it to start this run again.") from error


def _write_config(task: Task, folder: Path, step: int | None) -> None:
    """Write `config.json`; a run that resumes adds from which step, and by what it is made now."""
    part = {"step": step or 0, "threads": torch.get_num_threads()} | made_by()
    file = folder / "config.json"
    if step is None:
        config = {"task": task.kind, "settings": asdict(task), "parts": [part]}
    else:
        config = json.loads(file.read_text())
        config["parts"].append(part)
    _write(file, config)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


def _write(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, default=str) + "\n"
    _whole(path, lambda file: file.write(text.encode()))


def save(path: Path, state: Any) -> None:
    """Save tensors so that the file is whole, or as it was before, whatever happens meanwhile."""
    _whole(path, lambda file: torch.save(state, file))


def _whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
