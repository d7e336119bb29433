"""Every experiment runs from its command, and writes what it says."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.__main__ import EXPERIMENTS, main
from experiments.paper import toy
from experiments.runner import experiment as run

ROOT = Path(__file__).parents[1]


def test_help_lists_the_experiments():
    command = [sys.executable, "-m", "experiments", "--help"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [name for name in EXPERIMENTS if name not in found.stdout] == []
    assert found.stderr == ""


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_settings_of_an_experiment_are_its_flags(name, capsys):
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    assert exit.value.code == 0
    assert ("--data" if name == "fetch" else "--out") in capsys.readouterr().out


def test_toy_reproduces_figure_1_and_writes_it_down(tmp_path):
    main(["toy", "--out", str(tmp_path), "--starts", "2", "--sweep-steps", "50", "--meta-lrs", "0.1"])

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [summary[f"himmelblau_{key}"] for key in ("gd", "fop", "fop_paper")] == [386, 289, 290]
    assert summary["himmelblau_adam"] in (5397, 5398)  # the paper's, in float32
    assert [summary["booth_gd"], summary["booth_adam"]] == [832, 6221]
    assert [summary["booth_fop"], summary["booth_fop_paper"]] == pytest.approx([540, 536], abs=3)
    assert summary["booth_fop_safe"] < 300
    assert summary["himmelblau_fop_safe"] < 200
    for method in toy.SWEPT:
        assert {f"booth_failures_{method}", f"booth_failures_{method}_worst"} <= summary.keys()
        assert summary[f"himmelblau_failures_{method}"] <= summary[f"himmelblau_failures_{method}_worst"]

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["config"]["starts"] == 2
    assert config["config"]["booth"] == {"start": [8.0, 4.0], "lr": 0.005, "box": 10.0}
    assert config["versions"].keys() == {"metafop", "torch", "python"}

    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("trajectories.png", "failures.png"))
    events = EventAccumulator(str(tmp_path / "events" / "himmelblau" / "fop")).Reload()
    assert events.Scalars("value")[-1].step == 289
    assert events.Scalars("value")[-1].value < 1e-6
    assert events.Scalars("eigenvalue_max/x")[-1].value > 1


def test_defaults_compares_every_method_with_momentum(tmp_path):
    small = [
        "--steps",
        "2",
        "--seeds",
        "2",
        "--lrs",
        "0.1",
        "--meta-lrs",
        "1e-3",
        "--narrow",
        "2",
        "--wide",
        "4",
    ]
    main(["defaults", "--out", str(tmp_path), *small])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["momentum_training_loss"] == pytest.approx(2.3, abs=0.5)
    assert summary["as_printed_0.001_training_ahead"].endswith("of 2")
    assert (tmp_path / "defaults.png").stat().st_size > 10_000
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("loss/momentum")[-1].step == 1
    assert "| as printed | 0.001 |" in (tmp_path / "tables.md").read_text()


def test_bench_online_measures_every_case_over_the_plain_step(tmp_path):
    small = ["--repeats", "2", "--batch", "2", "--narrow", "2", "--wide", "2", "--no-compiled"]
    main(["bench-online", "--out", str(tmp_path), *small])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["mlp_eager_plain_over_plain"] == 1.0
    assert summary["cnn_eager_default_over_plain"] > 0
    assert summary["cnn_eager_closed_over_autograd"] > 0
    assert (tmp_path / "times.png").stat().st_size > 10_000


@pytest.mark.parametrize("method", ["gd", *toy.SWEPT])
def test_a_sweep_counts_as_single_runs_do(method, tmp_path):
    config = toy.Config(meta_lr=0.1, meta_lrs=(1e-3,), steps=40, sweep_steps=40, tolerance=100.0)
    surface, starts = toy.SURFACES["booth"], [(8.0, 4.0), (1.0, -2.0), (1.0, 3.5)]
    points = torch.tensor(starts)
    swept = toy.sweep(toy.METHODS[method], surface, 0.005, points, config)[config.grid.index(0.1)]
    with toy.Logger(tmp_path) as logger:
        runs = [toy.Descent(start, lr=0.005, box=0.0) for start in starts]
        single = [toy.trace(toy.METHODS[method], surface, descent, config, logger).steps for descent in runs]
    assert swept.tolist() == [math.inf if steps is None else steps for steps in single]


def test_the_safeguarded_default_does_not_fail_where_the_paper_does(generator):
    config = toy.Config(starts=20, meta_lrs=(1e-1,), sweep_steps=300)
    points = 10 * (2 * torch.rand(20, 2, generator=generator) - 1)
    counts = {
        name: toy.sweep(toy.METHODS[name], toy.SURFACES["booth"], 0.005, points, config)[-1]
        for name in ("paper", "exact", "safe")
    }
    failures = {name: found.isinf().double().mean().item() for name, found in counts.items()}
    assert failures["paper"] > failures["exact"] > failures["safe"] == 0


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


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_is_refused(value, tmp_path):
    with pytest.raises(ValueError, match=r"'loss' is .* Pass None"):
        run.finish(tmp_path, {"loss": value})
    assert not (tmp_path / "summary.json").exists()


def test_a_second_run_removes_what_would_pass_for_its_own_and_nothing_else(tmp_path):
    events = "events.out.tfevents.1"
    removed = ["summary.json", "tables.md", events, f"events/{events}", f"events/booth/{events}"]
    kept = ["notes.txt", "events/notes.txt", f"other/{events}"]
    for name in removed + kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    run.begin(toy.Config(out=tmp_path))
    assert [name for name in removed + kept if (tmp_path / name).exists()] == kept
