"""`summary.json`: the headline figures of an experiment, by name."""

import json
import math
from pathlib import Path

from rich.console import Console

RUNS_USED = "studied.txt"  # lists the run folders that a study is made of
Summary = dict[str, float | str | None]  # a number, a word, or None for what was not reached; by name


def write_summary(out: Path, figures: Summary) -> None:
    """Write the headline figures to `summary.json`, in their order, and say where everything is.

    None stands for what was not reached; a number that is not finite is refused.
    """
    for name, value in figures.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"The figure {name!r} is {value}, which JSON cannot hold. Pass None for it.")
    (out / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    files = ", ".join(sorted(path.name for path in out.iterdir() if path.is_file()))
    Console(markup=False).print(
        f"Written to {out}: {files}. Curves: tensorboard --logdir {out}", soft_wrap=True
    )
