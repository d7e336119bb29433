"""The house keeps its order: imports point one way, the core needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import metafop

ROOT = Path(metafop.__file__).parent
LAYERS = [
    {"types", "log", "progress"},
    {"protocols"},
    {"tree", "patterns"},
    {"randomness", "attention"},
    {"twice_differentiable", "hidden_derivatives", "norms"},
    {"stopped_gradients", "module_copies", "torch_errors"},
    {"recordable"},
    {"functional", "optimizers", "preconditioners", "validation", "loss_gradient"},
    {"loss_leaves"},
    {"training", "leaf_names"},
    {"hypergradients", "safeguards", "tasks"},
    {"diagnostics", "learned"},
    {"online_carry", "validation_loss"},
    {"online", "unrolled"},
    {"optim", "verify", "tensorboard", "fingerprint"},
    {"run_folder"},
    {"meta_training"},
]
EXTRAS = {"tensorboard": {"tensorboard", "PIL"}, "run_folder": {"filelock"}}  # torch needs filelock too
LAYER = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def imported(path):
    """Return the full dotted name of everything that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_and_siblings_do_not_know_each_other(path):
    here = part_of(path)
    parts = {name.split(".")[1] for name in imported(path) if name.startswith("metafop.")} - {here}
    assert parts <= LAYER.keys()
    assert [part for part in parts if LAYER[part] >= LAYER[here]] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_imports_torch_and_the_standard_library_alone(path):
    others = {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names - {"torch", "metafop"}
    assert others <= EXTRAS.get(part_of(path), set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_private_in_torch_is_used_for_trees_and_to_compile_alone(path):
    private = [name for name in imported(path) if name.startswith("torch.") and "._" in name]
    assert private == [] or str(path.relative_to(ROOT)) in (
        "tree.py",
        "hypergradients/compiled.py",
        "hypergradients/joint_graph.py",
        "hypergradients/matrix_products.py",
    )


def test_importing_metafop_leaves_the_extras_alone():
    extras = {"tensorboard", "filelock", "matplotlib", "rich", "tyro"}
    code = f"import sys, metafop; print(sorted({extras} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_is_there():
    assert [name for name in metafop.__all__ if getattr(metafop, name, None) is None] == []


def test_the_top_level_holds_what_it_should():
    root = ROOT.parent
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines() if not line.startswith(".")}
    assert top <= {"metafop", "tests", "experiments", "docs", "pyproject.toml", "README.md"}
