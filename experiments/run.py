"""What every experiment does around its own story: a folder, settings and figures in it, progress, tables."""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Generator

import metafop

STUDIED = "studied.txt"  # the names of the folders of the runs that a study is made of
WIDE = 160  # characters in a line of a table, where no terminal says
Figure = float | str | None  # a number, a word, or nothing reached


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
    """Make the folder `out` with `config.json` in it, and return the generator that all chance comes from.

    What an earlier run left there as `summary.json`, `tables.md` or `studied.txt`, or as TensorBoard events
    in it or in `events`, is removed: it would pass for this run's.
    """
    torch.set_num_threads(config.threads)
    settings = {"experiment": type(config).__module__, "config": asdict(config)} | made_by()
    try:
        config.out.mkdir(parents=True, exist_ok=True)
        (config.out / "config.json").write_text(json.dumps(settings, indent=2, default=str) + "\n")
        for name in ("summary.json", "tables.md", STUDIED):
            (config.out / name).unlink(missing_ok=True)
        for pattern in ("events.out.tfevents.*", "events/**/events.out.tfevents.*"):
            for old in config.out.glob(pattern):
                old.unlink()
    except OSError as error:
        raise SystemExit(
            f"Cannot write to --out {config.out} ({error.strerror}). Pass a folder that can be written."
        ) from None
    return Generator().manual_seed(config.seed)


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


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Give a function to call with what is done next, `total` times; the bar is gone in the end."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)


def show(out: Path, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, and add it to `tables.md`: the first column is words, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)  # no digit is cut off, in a file least
    rule = ["---", *["---:"] * (len(columns) - 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]
    with (out / "tables.md").open("a") as file:
        file.write("\n".join([title, "", *lines]) + "\n\n")


def finish(out: Path, figures: Mapping[str, Figure]) -> None:
    """Write the headline figures to `summary.json`, in their order, and say where everything is.

    None stands for what was not reached; a number that is not finite is refused.
    """
    for name, value in figures.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"The figure {name!r} is {value}, which JSON cannot hold. Pass None for it.")
    (out / "summary.json").write_text(json.dumps(dict(figures), indent=2) + "\n")
    files = ", ".join(sorted(path.name for path in out.iterdir() if path.is_file()))
    Console(markup=False).print(
        f"Written to {out}: {files}. Curves: tensorboard --logdir {out}", soft_wrap=True
    )
