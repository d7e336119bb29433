"""bench-unroll runs from its command, its methods agree."""

import json
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.__main__ import main

SMALL = {"rounds": 1, "horizon": 2, "deep-horizon": 2, "long": 1, "batch": 4}
NARROW = {"width": 4, "deep-width": 4, "channels": 2}


def test_bench_unroll_measures_every_method_over_the_best_peer(tmp_path):
    pytest.importorskip("higher")
    pytest.importorskip("torchopt")
    small = [f"--{name}={value}" for name, value in (SMALL | NARROW).items()]
    main(
        [
            "bench-unroll",
            "--out",
            str(tmp_path),
            *small,
            "--no-compiled",
            "--no-isolated",
            "--checked",
            "2",
            "3",
        ]
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    for case in ("mlp_t2", "cnn_t2", "deep_t2"):
        for method in ("fast", "frugal", "log", "fast_forward", "fast_eager", "higher", "torchopt"):
            assert summary[f"{case}_{method}_time_vs_best_peer"] > 0
            assert summary[f"{case}_{method}_memory_vs_best_peer"] > 0
            assert summary[f"{case}_{method}_error"] < 1e-10
        assert summary[f"{case}_{summary[f'{case}_best_peer_memory']}_memory_vs_best_peer"] == 1.0
    assert summary["checks_mlp_eager_t2_bytes"] == summary["checks_cnn_eager_t3_bytes"] == 0
    assert {
        f"checks_{net}_{kind}_t3_percent" for net in ("mlp", "cnn") for kind in ("eager", "first")
    } <= summary.keys()
    assert summary["cnn_time_vs_plain_training"] == summary["cnn_t2_fast_time_vs_training"]
    assert summary["time_t2_over_t1"] > 0
    assert summary["reversible_memory_t10_over_t1"] > 0
    assert summary["reversible_bits_per_parameter_step"] == 6.4  # one word of 64 bits, over ten steps
    assert "| torchopt |" in (tmp_path / "tables.md").read_text()
    assert (tmp_path / "unroll.png").stat().st_size > 10_000
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("mlp_t2/frugal")[-1].step == 0


def test_a_missing_peer_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchopt", None)
    with pytest.raises(SystemExit, match=r"^bench-unroll needs torchopt, which is not installed") as exit:
        main(["bench-unroll"])
    assert str(exit.value).endswith(': pip install "metafop[peers]".')
