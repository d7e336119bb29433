"""The table of private names of torch in docs/contributing.md has all that the code uses, and where."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (`[^|]+\.py`) \| ([^|]+) \| [^|]+ \| [\d., ]+ \|$", re.MULTILINE)
NAME = re.compile(r"`([\w./]+)`")
TABLE = [(NAME.findall(where), NAME.findall(what)) for where, what in ROW.findall(PAGE)]
TREES = {
    str(path.relative_to(ROOT / folder)): ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("metafop", "experiments")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node):
    """`torch._ops.OpOverload` of what is written so; of an attribute of anything else, its name alone."""
    parts, base = [node.attr], node.value
    while isinstance(base, ast.Attribute):
        parts.append(base.attr)
        base = base.value
    if isinstance(base, ast.Name) and base.id in ("torch", "nn"):
        return ".".join([base.id, *reversed(parts)])
    return node.attr


def defined(tree):
    """The members of its classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield each.name
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    yield each.target.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


OWN = {name for tree in TREES.values() for name in defined(tree)}
OTHERS = {"_asdict", "_destroy", "_exit", "_fields", "_getframe", "_make", "_replace"}  # not torch's


def used(tree):
    """The private names of torch in a file: what is imported or read, attributes of objects, arguments."""
    names, parts = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.keyword) and node.arg and is_private(node.arg):
            names |= {node.arg} - OWN
        if isinstance(node, ast.Attribute):
            parts |= {dotted(node.value)} if isinstance(node.value, ast.Attribute) else set()
            names |= {dotted(node)} - OWN - OTHERS
    return {name for name in names - {x for x in parts if "." in x} if is_private(name)}


USED = {path: used(tree) for path, tree in TREES.items()}


def test_the_table_has_every_private_name_and_no_other():
    told = [name for _, what in TABLE for name in what]
    assert sorted(told) == sorted(set(told))
    assert set(told) == set().union(*USED.values())


@pytest.mark.parametrize(("where", "names"), TABLE, ids=lambda x: x[0] if x else "others")
def test_each_row_says_where(where, names):
    if names:
        assert {path for path, found in USED.items() if found & set(names)} == set(where)
