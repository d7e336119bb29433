"""`toy` reproduces Figure 1, and counts failures from random starts as single runs do."""

import json
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.__main__ import main
from experiments.paper.toy.command import SWEPT, Config, Descent, sweep, trace
from experiments.paper.toy.methods import METHODS
from experiments.paper.toy.surfaces import SURFACES
from metafop.tensorboard import Logger


def test_toy_reproduces_figure_1_and_writes_it_down(tmp_path):
    main(["toy", "--out", str(tmp_path), "--starts", "2", "--sweep-steps", "50", "--meta-lrs", "0.1"])

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [summary[f"himmelblau_{key}"] for key in ("gd", "fop", "fop_paper")] == [386, 289, 290]
    assert summary["himmelblau_adam"] in (5397, 5398)  # the paper's, in float32
    assert [summary["booth_gd"], summary["booth_adam"]] == [832, 6221]
    assert [summary["booth_fop"], summary["booth_fop_paper"]] == pytest.approx([540, 536], abs=3)
    assert summary["booth_fop_safe"] < 300
    assert summary["himmelblau_fop_safe"] < 200
    for method in SWEPT:
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


@pytest.mark.parametrize("method", ["gd", *SWEPT])
def test_a_sweep_counts_as_single_runs_do(method, tmp_path):
    config = Config(meta_lr=0.1, meta_lrs=(1e-3,), steps=40, sweep_steps=40, tolerance=100.0)
    surface, starts = SURFACES["booth"], [(8.0, 4.0), (1.0, -2.0), (1.0, 3.5)]
    points = torch.tensor(starts)
    swept = sweep(METHODS[method], surface, 0.005, points, config)[config.grid.index(0.1)]
    with Logger(tmp_path) as logger:
        runs = [Descent(start, lr=0.005, box=0.0) for start in starts]
        single = [trace(METHODS[method], surface, descent, config, logger).steps for descent in runs]
    assert swept.tolist() == [math.inf if steps is None else steps for steps in single]


def test_the_safeguarded_default_does_not_fail_where_the_paper_does(generator):
    config = Config(starts=20, meta_lrs=(1e-1,), sweep_steps=300)
    points = 10 * (2 * torch.rand(20, 2, generator=generator) - 1)
    counts = {
        name: sweep(METHODS[name], SURFACES["booth"], 0.005, points, config)[-1]
        for name in ("paper", "exact", "safe")
    }
    failures = {name: found.isinf().double().mean().item() for name, found in counts.items()}
    assert failures["paper"] > failures["exact"] > failures["safe"] == 0
