"""Every citation of docs/math.md names a section of it, and every name that it prints is in the code."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = "docs/math.md"
PROSE = re.sub(r"(?ms)^```.*?^```[ \t]*$", "", (ROOT / PAGE).read_text(encoding="utf-8"))
SECTIONS = [int(number) for number in re.findall(r"(?m)^## (\d+)\. \S", PROSE)]
NAMES = sorted(set(re.findall(r"`([A-Za-z]\w*(?:\.\w+)+|[A-Z]\w+)`", PROSE)))
CITATION = re.compile(
    rf"{re.escape(PAGE)}(?:,\s+(?:(?:equation|section)s?\s+)?(\d+(?:(?:,| and| to) \d+)*))?"
)
CITING = {
    str(path.relative_to(ROOT)): text
    for pattern in ("*.md", "docs/**/*.md", "metafop/**/*.py", "experiments/**/*.py")
    for path in sorted(ROOT.glob(pattern))
    if PAGE in (text := path.read_text(encoding="utf-8"))
}


def cited(text: str) -> list[list[int]]:
    """Return the sections that each citation names; none for one that names the page alone."""
    return [[int(n) for n in re.findall(r"\d+", match[1] or "")] for match in CITATION.finditer(text)]


def test_sections_are_numbered_in_order():
    assert list(range(1, len(SECTIONS) + 1)) == SECTIONS


@pytest.mark.parametrize("path", CITING)
def test_citations_name_sections_that_exist(path):
    missing = {n for numbers in cited(CITING[path]) for n in numbers} - set(SECTIONS)
    assert not missing, f"{PAGE} has no section {sorted(missing)}"


@pytest.mark.parametrize("path", [path for path in CITING if path.startswith("metafop")])
def test_docstrings_cite_a_section_and_not_the_page_alone(path):
    assert all(cited(CITING[path]))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("the chain rule (docs/math.md, 7).", [[7]]),
        ("and biased: docs/math.md, equation 4.", [[4]]),
        ("credit (docs/math.md,\n    12 and 13)", [[12, 13]]),
        ("more in docs/math.md. 3 of them", [[]]),
    ],
)
def test_a_citation_is_read(text, numbers):
    assert cited(text) == numbers


@pytest.mark.parametrize("name", NAMES)
def test_names_are_in_the_code(name):
    pkgutil.resolve_name(name if name.startswith(("torch.", "metafop.")) else f"metafop.{name}")
