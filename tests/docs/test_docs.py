"""Every example in the README and in docs/ runs, and the README installs only what exists."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("README.md"), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^`\n]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, info: str) -> list[str]:
    """Return the blocks fenced as `info`, padded so that a traceback gives their lines in the file."""
    text = path.read_text(encoding="utf-8")
    return [
        "\n" * text.count("\n", 0, match.start("body")) + match["body"]
        for match in FENCE.finditer(text)
        if match["info"].strip() == info
    ]


@pytest.fixture
def untouched(tmp_path, monkeypatch):
    """An empty directory to run in; torch's default dtype, generator, threads and gradient mode come back."""
    monkeypatch.chdir(tmp_path)
    dtype, threads, enabled = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    with torch.random.fork_rng():
        yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(enabled)


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=name)
def test_examples_run(path, untouched):
    namespace = {"__name__": "__main__"}
    for block in blocks(path, "python"):
        exec(compile(block, path, "exec"), namespace)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_python_fences_are_run_or_marked_no_run(path):
    fences = re.findall(r"(?im)^\s*(?:```|~~~)\s*py", path.read_text(encoding="utf-8"))
    assert len(fences) == len(blocks(path, "python") + blocks(path, "python no-run"))


def test_links_of_the_readme_lead_somewhere_and_on_a_package_index_to_the_repository():
    text, project = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "pyproject.toml"
    targets = [target.partition("#")[0] for target in re.findall(r"\]\((?!https?://)([^)]+)\)", text)]
    assert [target for target in targets if not (ROOT / target).exists()] == []
    hook = tomllib.loads(project.read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]["hooks"]
    for rule in hook["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == []
    assert "](https://raw.githubusercontent.com/" in text


def test_readme_installs_only_extras_that_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    commands = "\n".join(blocks(ROOT / "README.md", "sh"))
    named = re.findall(rf"(?:{project['name']}|\.)\[([^\]]+)\]|--extra[ =](\S+)", commands)
    extras = {extra.strip() for groups in named for extra in "".join(groups).split(",")}
    assert commands, "README.md has no quick start fenced as sh"
    assert extras <= set(project.get("optional-dependencies", {}))
