"""`defaults` runs from its command."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.__main__ import main


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
