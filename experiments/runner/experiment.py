"""The start of every experiment: its output folder, its settings in `config.json`, its random generator."""

import json
import os
import platform
import subprocess
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Generator

import metafop
from experiments.reporting.summary import RUNS_USED


class Settings(Protocol):
    """What the `Config` of every experiment has, besides its own fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def out(self) -> Path: ...

    @property
    def seed(self) -> int: ...

    @property
    def threads(self) -> int: ...


def begin(config: Settings) -> Generator:
    """Make the folder `out` with `config.json` in it, and return the generator of all random numbers.

    What an earlier run left there as `summary.json`, `tables.md` or `studied.txt`, or as TensorBoard events
    in it or in `events`, is removed: it could be taken for this run's. A folder of another experiment is
    refused.
    """
    torch.set_num_threads(config.threads)
    earlier(config)
    settings = {"experiment": type(config).__module__, "config": asdict(config)} | made_by()
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        (config.out / "config.json").write_text(json.dumps(settings, indent=2, default=str) + "\n")
        for name in ("summary.json", "tables.md", RUNS_USED):
            (config.out / name).unlink(missing_ok=True)
        for pattern in ("events.out.tfevents.*", "events/**/events.out.tfevents.*"):
            for old in config.out.glob(pattern):
                old.unlink()
    except OSError as error:
        raise SystemExit(
            f"Cannot write to --out {config.out} ({error.strerror}). Pass a folder that can be written."
        ) from None
    return Generator().manual_seed(config.seed)


def earlier(config: Settings) -> dict[str, Any]:
    """Return the `config.json` that an earlier run of this experiment left in `out`; {} if none can be read.

    Raises SystemExit if it is another's.
    """
    file = config.out / "config.json"
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    match found:
        case {"experiment": str(owner)} if owner == type(config).__module__ or not _module(owner).exists():
            return found  # a module that is no more was moved, and may have been this one
        case {"experiment": str(owner)}:
            pass
        case _:
            owner = "another program"
    raise SystemExit(
        f"--out {config.out} holds the files of {owner}, and some would be overwritten. Pass another folder, "
        f"or delete {file} to use this one."
    )


def _module(name: str) -> Path:
    return Path(__file__).parents[2].joinpath(*name.split(".")).with_suffix(".py")


@cache
def made_by() -> dict[str, Any]:
    """Return what a run is made by: versions, commit and machine."""
    versions = {name: module.__version__ for name, module in (("metafop", metafop), ("torch", torch))}
    versions["python"] = platform.python_version()
    machine = {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count()}
    return {"versions": versions, "commit": _commit(), "machine": machine}


def _commit() -> str | None:
    """Return the commit of this clone, "-dirty" if it has changed since; None if it is no clone."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
