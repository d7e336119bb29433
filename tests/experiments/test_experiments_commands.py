"""Every command is listed with what it does, its settings are its flags, and what it cannot do is refused."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from experiments.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("arguments", [[], ["toys"], ["--preset", "smoke"]], ids=str)
def test_without_the_name_of_a_command_the_names_are_given(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "NAME" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--startz", "3"], ["--starts", "0"], ["--meta-lrs", "-1"]], ids=str)
def test_a_bad_flag_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["toy", *arguments])
    assert exit.value.code == 2
    assert "starts" in capsys.readouterr().err


def test_an_out_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"Cannot write to --out .* Pass a folder"):
        main(["toy", "--out", str(tmp_path / "file" / "inside")])


def test_a_missing_extra_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit, match=r'need rich, .*: pip install "metafop\[experiments\]"'):
        main(["toy"])
