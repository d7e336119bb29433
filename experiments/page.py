"""The page of an experiment in docs/results: its template, filled with what the runs' own files say."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfile
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TEMPLATES = RESULTS / "templates"


@dataclass(frozen=True)
class Config:
    """Write docs/results/NAME.md anew, from docs/results/templates/NAME.md and the folder of an experiment.

    In a template, `{fop_accuracy:.1f}` is a figure of summary.json, `{tables}` are all tables, and `{made}`
    is what they were made by. The pictures are copied, and all that was filled in is kept in NAME.json: a
    test sees that a page says no more than that.
    """

    name: str  # of the experiment
    out: Path | None = None  # its folder; if None, runs/NAME


def main(config: Config) -> None:
    out = config.out or Path("runs") / config.name
    if not (out / "summary.json").exists():
        raise SystemExit(
            f"{out} has no summary.json. Run: python -m experiments {config.name} --out {out}, to its end."
        )
    found = gathered(out)
    (RESULTS / f"{config.name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    (RESULTS / f"{config.name}.md").write_text(rendered(config.name))
    for picture in out.glob("*.png"):
        copyfile(picture, RESULTS / pictured(config.name, picture.stem))
    print(f"Written: {RESULTS / config.name}.md")


def rendered(name: str) -> str:
    """Return the page that a template and the kept figures make."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    template = (TEMPLATES / f"{name}.md").read_text()
    try:
        return template.format(**found["summary"], tables=found["tables"].strip(), made=found["made"])
    except KeyError as error:
        raise SystemExit(
            f"The template of {name} asks for {error}, and summary.json has no such figure. Correct either."
        ) from None


def pictured(name: str, picture: str) -> str:
    """Return the name that a picture has beside the page."""
    return f"{name}.png" if picture.replace("_", "-") == name else f"{name}-{picture}.png"


def gathered(out: Path) -> dict[str, Any]:
    """Return the figures, the tables, and by what they were made, in words."""
    summary = json.loads((out / "summary.json").read_text())
    # A format takes no hyphen in a name.
    figures = {name.replace("-", "_").replace(".", "_"): value for name, value in summary.items()}
    return {"summary": figures, "tables": (out / "tables.md").read_text(), "made": made(out)}


def made(out: Path) -> str:
    """Return in a sentence what the experiment was made by, from its own files and those of its runs."""
    folders = sorted(path.parent for path in out.glob("runs/*/result.json"))
    seconds = [json.loads((folder / "result.json").read_text())["seconds"] for folder in folders]
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    configs = configs or [json.loads((out / "config.json").read_text())]
    machines = _listed(f"{c['machine']['processor']}, {c['machine']['cores']} cores" for c in configs)
    versions = _listed(f"torch {c['versions']['torch']}, Python {c['versions']['python']}" for c in configs)
    commits = _listed(str(c["commit"])[:10] for c in configs)
    spent = f"{len(seconds)} runs, {_time(sum(seconds))} in all if one after the other; " if seconds else ""
    return f"{spent}{machines}; {versions}; commit {commits}"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds > 7200 else f"{seconds / 60:.0f} minutes"


def _listed(words: Iterable[str]) -> str:
    return " and ".join(sorted(set(words)))
