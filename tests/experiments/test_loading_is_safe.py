"""No file that is loaded can run code: torch.load reads plain data alone, everywhere."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("metafop", "experiments", "docs/examples")
    for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
]


def loads(path):
    """Return `weights_only` of every call of torch.load in a file, True where it is left to its default."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            yield given.get("weights_only", "True")


def test_torch_load_reads_data_and_no_code():
    found = {path: set(loads(path)) for path in FILES}
    assert [path for path, given in found.items() if given - {"True"}] == []
    assert {"runs.py", "run_folder.py"} <= {path.name for path, given in found.items() if given}


def test_nothing_is_read_by_pickle_and_torch_load_goes_by_no_other_name():
    unseen = (
        "import pickle",
        "pickle import load",
        "from torch import load",
        "torch.serialization import load",
    )
    assert [path for path in FILES for way in unseen if way in path.read_text()] == []
