"""Imports between the packages of experiments point one way, and commands do not import each other."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import experiments
from experiments.__main__ import COMMANDS

ROOT = Path(experiments.__file__).parent
# A package imports from those below it, and from its own modules.
LAYERS = [
    {"data", "reporting"},
    {"runner"},
    {"vision", "language", "measuring"},
    {"paper", "studies", "benchmarks"},
]
LAYER = {package: height for height, packages in enumerate(LAYERS) for package in packages}
FILES = {
    "experiments." + ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}
MODULES = [name for name in FILES if name != "experiments.__main__"]


@cache
def imported(module):
    """Return the modules of experiments that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & FILES.keys()


def package(module):
    return module.split(".")[1]


def experiment(module):
    """Return the command that a module belongs to: its package, or its file if that is all there is."""
    for name, command in COMMANDS.items():
        home = command.module.removesuffix(".command")
        if module == home or module.startswith(f"{home}."):
            return name
    return None


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    others = {package(name) for name in imported(module)} - {package(module)}
    assert [name for name in others if LAYER[name] >= LAYER[package(module)]] == []


@pytest.mark.parametrize("module", MODULES)
def test_no_experiment_imports_another(module):
    own = experiment(module)
    others = {experiment(name) for name in imported(module)} - {own, None}
    assert others == set()


def test_every_module_of_an_experiment_belongs_to_a_command():
    top = {"paper", "studies", "benchmarks"}
    assert [name for name in MODULES if package(name) in top and experiment(name) is None] == []


def test_there_is_no_cycle_among_modules():
    TopologicalSorter({name: imported(name) for name in FILES}).prepare()  # raises CycleError


def run(*arguments):
    """Return the modules of experiments, and torch if it is among them, that a command has imported."""
    code = (
        "import sys\n"
        "from experiments.__main__ import main\n"
        f"try: main({list(arguments)!r})\n"
        "except SystemExit: pass\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, check=True
    )
    return set(found.stderr.splitlines()) & (FILES.keys() | {"torch"})


def test_the_list_of_commands_imports_no_command_and_no_torch():
    light = {f"experiments.runner.{name}" for name in ("extras", "interruption", "presets")}
    assert run("--help") == {"experiments.__main__"} | light


@pytest.mark.parametrize("name", ["toy", "bench-overhead", "bipedal"])
def test_a_command_imports_no_other(name):
    found = {experiment(module) for module in run(name, "--help") - {"torch"}} - {None}
    assert found == {name}
