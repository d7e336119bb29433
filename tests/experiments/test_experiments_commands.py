"""Every command is listed with what it does, its settings are its flags, and what it cannot do is refused."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from experiments.__main__ import COMMANDS, main
from experiments.runner.settings import refusals

ROOT = Path(__file__).parents[2]


def refused(arguments, capsys):
    """Return what is said of arguments that are refused, before anything runs."""
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_help_lists_the_commands():
    command = [sys.executable, "-m", "experiments", "--help"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split()[0] for line in found.stdout.splitlines() if line.startswith("  ") and line.strip()]
    assert [name for name in COMMANDS if name not in listed] == []
    assert found.stderr == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_is_the_first_line_of_its_settings(name):
    assert import_module(COMMANDS[name].module).Config.__doc__.splitlines()[0] == COMMANDS[name].summary


@pytest.mark.parametrize("name", COMMANDS)
def test_the_settings_of_a_command_are_its_flags(name, capsys):
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    assert exit.value.code == 0
    assert ("--data" if name == "fetch" else "--out") in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_has_the_file_and_the_page_of_a_command(name):
    text = (ROOT / "experiments" / "README.md").read_text()
    [row] = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    _, code, _, page = (cell.strip() for cell in row.strip("|").split("|"))
    home = COMMANDS[name].module.removesuffix(".command").replace(".", "/")
    assert ROOT / "experiments" / code.strip("`/") in (ROOT / home, ROOT / f"{home}.py")
    written = (ROOT / "docs" / "results" / f"{name}.md").exists()
    assert page == (f"[{name}](../docs/results/{name}.md)" if written else "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "NAME is missing: python -m experiments --help lists the commands."),
        (["--preset", "smoke"], "NAME is missing: python -m experiments --help lists the commands."),
        (["toys"], "'toys', no command: python -m experiments --help lists them. Did you mean toy?"),
        (["zz"], "'zz', no command: python -m experiments --help lists them."),
    ],
    ids=str,
)
def test_without_the_name_of_a_command_it_is_said_where_the_names_are(arguments, said, capsys):
    assert refused(arguments, capsys).endswith(f"{said}\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--startz", "3"], "--starts INT"),
        (["--starts", "three"], "Error parsing --starts: invalid literal for int()"),
        (["--starts", "0"], "toy: error: --starts takes 1 or more, got 0. Pass a larger number."),
        (["--seed", "-1"], "toy: error: --seed takes 0 or more, got -1. Pass a larger number."),
        (["--tolerance", "0"], "--tolerance takes numbers above 0, got 0.0. Pass a larger number."),
        (["--booth.lr", "nan"], "--booth.lr takes numbers above 0, got nan. Pass a larger number."),
        (["--meta-lrs", "1", "-1"], "--meta-lrs takes numbers above 0, got -1.0. Pass a larger number."),
        (["--meta-lrs"], "--meta-lrs takes one value or more, got none. Name some, or leave the flag out."),
    ],
    ids=str,
)
def test_a_bad_flag_is_refused_and_the_remedy_said(flags, said, capsys):
    assert said in refused(["toy", *flags], capsys)


def test_a_method_that_is_misspelt_or_named_twice_is_refused(capsys):
    said = refused(["cifar10", "--methods", "momentun"], capsys)
    assert "invalid choice 'momentun' for argument '--methods'" in said
    assert "'pp-hd'" in said
    said = refused(["cifar10", "--methods", "momentum", "fop", "fop"], capsys)
    assert said.endswith("--methods takes each value once, got fop more often. Name it once.\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_settings_of_every_preset_are_what_they_may_be(name):
    module = import_module(COMMANDS[name].module)
    named = {"name": name} if name == "page" else {}
    presets = getattr(module, "PRESETS", {}).values() or [module.Config(**named)]
    assert [why for config in presets for why in refusals(config)] == []


def test_an_out_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"Cannot write to --out .* Pass a folder"):
        main(["toy", "--out", str(tmp_path / "file" / "inside")])
    with pytest.raises(SystemExit, match=r"Cannot write to --out .* Pass a folder"):
        main(["toy", "--out", str(tmp_path / "file")])


def test_a_missing_extra_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit) as exit:
        main(["toy"])
    assert str(exit.value) == 'toy needs rich, which is not installed: pip install "metafop[experiments]".'
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SystemExit, match=r"^toy needs PIL, rich and tqdm, which are not installed: pip"):
        main(["toy"])
