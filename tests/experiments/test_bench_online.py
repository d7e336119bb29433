"""bench-online runs from its command."""

import json

from experiments.__main__ import main


def test_bench_online_measures_every_case_over_the_plain_step(tmp_path):
    small = ["--repeats", "2", "--batch", "2", "--narrow", "2", "--wide", "2", "--no-compiled"]
    smaller = ["--layers", "1", "--width", "8", "--length", "4", "--sequences", "2"]
    main(["bench-online", "--out", str(tmp_path), *small, *smaller])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["mlp_eager_plain_over_plain"] == 1.0
    assert summary["cnn_eager_default_over_plain"] > 0
    assert summary["cnn_eager_closed_over_autograd"] > 0
    assert summary["online_transformer_adamw_over_adamw"] == 1.0
    assert summary["online_transformer_eager_over_adamw"] > 0
    assert (tmp_path / "times.png").stat().st_size > 10_000
