"""bench-unroll runs from its command, its ways agree, and the memory that it reports is what was held."""

import json
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.__main__ import main
from experiments.benchmarks.unroll.methods import WINDOW, peak_of_tensors, peak_resident

SMALL = {"rounds": 1, "horizon": 2, "deep-horizon": 2, "long": 1, "batch": 4}
NARROW = {"width": 4, "deep-width": 4, "channels": 2}


def test_bench_unroll_measures_every_way_over_the_best_peer(tmp_path):
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
        for way in ("fast", "frugal", "log", "fast_forward", "fast_eager", "higher", "torchopt"):
            assert summary[f"{case}_{way}_time_vs_best_peer"] > 0
            assert summary[f"{case}_{way}_memory_vs_best_peer"] > 0
            assert summary[f"{case}_{way}_error"] < 1e-10
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
    with pytest.raises(SystemExit, match=r'with torchopt, .*: pip install "metafop\[experiments,peers\]"'):
        main(["bench-unroll"])


def test_the_peak_of_tensors_is_the_most_that_was_held_at_once():
    def held(count):
        kept = []
        for _ in count:
            kept.append(torch.empty(1000, dtype=torch.uint8))
            torch.empty(300, dtype=torch.uint8)
        kept = kept[:10]
        return torch.empty(5000, dtype=torch.uint8)

    steps = 2 * WINDOW + 1  # so that the record is looked into twice on the way
    assert peak_of_tensors(held, range(steps)) == 1000 * steps + 300
    assert peak_of_tensors(held, range(3)) == 3 * 1000 + 5000


def test_the_peak_of_a_process_counts_what_was_freed_again():
    found = peak_resident(lambda: torch.ones(2**23).sum())
    assert found is None or found / 2**20 == pytest.approx(64, abs=4)  # None where the system does not tell
