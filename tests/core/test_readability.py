"""What can be read in one go stays so: classes, functions and files have limits."""

import ast
from pathlib import Path

import pytest

import metafop

ROOT = Path(metafop.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def body_lines(function):
    """The lines of a function's body, without its docstring."""
    body = function.body
    first = body[1] if ast.get_docstring(function) and len(body) > 1 else body[0]
    return body[-1].end_lineno - first.lineno + 1


def attributes(cls):
    """The fields of a class, and what its methods assign to self."""
    fields = {
        x.target.id for x in cls.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
    }
    assigned = {
        x.attr
        for x in ast.walk(cls)
        if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)
        if isinstance(x.value, ast.Name) and x.value.id == "self"
    }
    return fields | assigned


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_classes_are_small(path):
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    assert text.count("\n") <= 300
    assert [x.name for x in nodes if isinstance(x, ast.FunctionDef) if body_lines(x) > 40] == []
    assert [x.name for x in nodes if isinstance(x, ast.ClassDef) if len(attributes(x)) > 12] == []
