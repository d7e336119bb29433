"""bench-online runs from its command."""

import json

from experiments.__main__ import main


def test_bench_online_measures_every_case_over_the_plain_step(tmp_path):
    small = ["--repeats", "2", "--batch", "2", "--narrow", "2", "--wide", "2", "--no-compiled"]
    main(["bench-online", "--out", str(tmp_path), *small])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["mlp_eager_plain_over_plain"] == 1.0
    assert summary["cnn_eager_default_over_plain"] > 0
    assert summary["cnn_eager_closed_over_autograd"] > 0
    assert (tmp_path / "times.png").stat().st_size > 10_000
