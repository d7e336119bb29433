"""The page of an experiment in docs/results: its template, filled with what the runs' own files say."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

import tyro

from experiments.reporting.summary import RUNS_USED

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TEMPLATES = RESULTS / "templates"


@dataclass(frozen=True)
class Config:
    """Write a page of docs/results again, from its template and the folder of an experiment.

    The page is docs/results/NAME.md, its template docs/results/templates/NAME.md. In a template,
    `{fop_accuracy:.1f}` is a figure of summary.json, `{tables}` are all tables, and `{made}` is what they
    were made by. The pictures are copied, and all that was filled in is kept in NAME.json: a test holds the
    page to it.
    """

    name: tyro.conf.Positional[str]  # of the experiment
    out: Path | None = None  # its folder; if None, runs/NAME


def main(config: Config) -> None:
    if not (TEMPLATES / f"{config.name}.md").exists():
        known = ", ".join(sorted(path.stem for path in TEMPLATES.glob("*.md")))
        raise SystemExit(f"There is no template of a page {config.name!r}. Name one of {known}.")
    out = config.out or Path("runs") / config.name
    if not (out / "summary.json").exists():
        raise SystemExit(
            f"{out} has no summary.json. Run: python -m experiments {config.name} --out {out}, to its end."
        )
    found = gathered(out)
    text = filled(config.name, found)
    (RESULTS / f"{config.name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    (RESULTS / f"{config.name}.md").write_text(text)
    for picture in (*out.glob("*.png"), *out.glob("*.gif")):
        copyfile(picture, RESULTS / pictured(config.name, picture))
    print(f"Written: {RESULTS / config.name}.md")


def rendered(name: str) -> str:
    """Return the page that a template and the kept figures make."""
    return filled(name, json.loads((RESULTS / f"{name}.json").read_text()))


def filled(name: str, found: dict[str, Any]) -> str:
    template = (TEMPLATES / f"{name}.md").read_text()
    try:
        return template.format(**found["summary"], tables=found["tables"].strip(), made=found["made"])
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(
            f"The template of {name} asks for what summary.json does not have, or not as a number: {error}. "
            "Correct either."
        ) from None


def pictured(name: str, picture: Path) -> str:
    """Return the name that a picture has beside the page."""
    own = picture.stem.replace("_", "-") == name
    return f"{name}{picture.suffix}" if own else f"{name}-{picture.stem}{picture.suffix}"


def gathered(out: Path) -> dict[str, Any]:
    """Return the figures, the tables, and by what they were made, in words."""
    summary = json.loads((out / "summary.json").read_text())
    # A format takes no hyphen in a name.
    figures = {name.replace("-", "_").replace(".", "_"): value for name, value in summary.items()}
    return {"summary": figures, "tables": (out / "tables.md").read_text(), "made": made(out)}


def made(out: Path) -> str:
    """Return in a sentence what the experiment was made by, from its own files and those of its runs."""
    studied = out / RUNS_USED
    names = sorted(set(studied.read_text().split())) if studied.exists() else []
    seconds = [json.loads((out / "runs" / name / "result.json").read_text())["seconds"] for name in names]
    configs = [json.loads((out / "runs" / name / "config.json").read_text()) for name in names]
    parts = [part for config in configs for part in config["parts"]]
    parts = parts or [json.loads((out / "config.json").read_text())]
    machines = _listed(f"{p['machine']['processor']}, {p['machine']['cores']} cores" for p in parts)
    versions = _listed(f"torch {p['versions']['torch']}, Python {p['versions']['python']}" for p in parts)
    commits = _listed(re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}", r"\1", str(p["commit"])) for p in parts)
    spent = f"{len(seconds)} runs, {_time(sum(seconds))} in all if one after the other; " if seconds else ""
    return f"{spent}{machines}; {versions}; commit {commits}"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds > 7200 else f"{seconds / 60:.0f} minutes"


def _listed(words: Iterable[str]) -> str:
    return " and ".join(sorted(set(words)))
