"""`bipedal` runs from its command, and refuses what it cannot run."""

import json
import multiprocessing
import sys
from dataclasses import replace

import pytest
from bipedal_task import TASK
from PIL import Image
from problems import refusal

from experiments.__main__ import main
from experiments.paper.bipedal import command
from experiments.paper.bipedal.ppo import Settings

pytestmark = pytest.mark.usefixtures("single_precision")


def test_the_command_writes_a_figure_tables_and_recordings(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.paper.bipedal.training.DIAGNOSTICS_EVERY", 2)
    main(["bipedal", "--preset", "smoke", "--out", str(tmp_path), "--methods", "momentum", "adam-sb3", "fop"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    for name in ("momentum", "adam-sb3", "fop"):
        assert -200 < summary[f"rough_{name}_best"] < 350
        assert summary[f"standard_{name}_diverged"] == 0
        assert summary[f"standard_{name}_steps_per_second"] > 0
        assert -200 < summary[f"elsewhere_{name}"] < 350
    assert "standard_fop_over_momentum_late" in summary
    assert 0 < summary["standard_fop_smallest_value"] <= 1 < summary["standard_fop_largest_value"] < 10
    assert summary["rough_film"].endswith("seed 0")
    assert (tmp_path / "bipedal.png").stat().st_size > 10_000
    with Image.open(tmp_path / "rough.gif") as picture:
        picture.seek(1)  # there is a second frame
        assert picture.size == (300, 200)
    assert "The rough terrain" in capsys.readouterr().out


def test_what_is_not_installed_is_said_in_one_sentence(monkeypatch):
    smoke = command.PRESETS["smoke"]
    monkeypatch.setitem(sys.modules, "Box2D", None)
    said = refusal(command.main, smoke)
    assert said == 'bipedal needs Box2D, which is not installed: pip install "metafop[rl]".'
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    said = refusal(command.main, replace(smoke, methods=("adam-sb3",)))
    assert said == (
        'bipedal needs Box2D and stable_baselines3, which are not installed: pip install "metafop[peers,rl]".'
    )


def test_its_settings_do_not_need_what_its_runs_need():
    code = (
        "import sys; sys.modules |= dict.fromkeys(('gymnasium', 'Box2D', 'stable_baselines3'))\n"
        "import experiments.paper.bipedal.command"
    )
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"steps": 63}, "got steps=63"), ({"ppo": Settings(horizon=32, minibatch=65)}, "got 65")],
)
def test_runs_that_are_too_short_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(TASK, **changes)
    with pytest.raises(ValueError, match="steps=100"):
        command.Config(steps=100)


@pytest.mark.parametrize(
    "changes", [{"seeds": 0}, {"rough_seeds": -1}, {"methods": ("fop", "fop")}, {"methods": ()}]
)
def test_a_study_that_compares_nothing_or_the_same_twice_is_refused(changes):
    with pytest.raises(ValueError, match=f"got .*{next(iter(changes))}="):
        command.Config(**changes)


def test_a_terrain_without_seeds_is_left_out(tmp_path, capsys):
    main(["bipedal", "--preset", "smoke", "--out", str(tmp_path), "--methods", "adam", "--rough-seeds", "0"])
    assert "rough" not in (tmp_path / "tables.md").read_text()
    assert sorted(path.name for path in tmp_path.glob("*.gif")) == ["standard.gif"]
