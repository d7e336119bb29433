"""bench-unroll runs from its command, its methods agree."""

import json
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.__main__ import main
from experiments.measuring.isolation import fresh

HORIZONS = {"horizon": 2, "deep-horizon": 2, "transformer-horizon": 2, "small-horizon": 3, "long": 1}
SMALL = HORIZONS | {"jax-cnn-horizon": 2, "jax-deep-horizon": 2, "rounds": 1, "processes": 1, "batch": 4}
NARROW = {"width": 4, "deep-width": 4, "small-width": 4, "channels": 2} | {
    "layers": 1,
    "transformer-width": 8,
    "length": 5,
}
METHODS = ("fast", "frugal", "log", "fast_forward", "eager", "eager_all", "eager_frugal", "torchopt")
WAYS = ("all", "sqrt", "log", "reversible", "forward")


def flags(sizes):
    return [f"--{name}={value}" for name, value in sizes.items()]


def test_bench_unroll_measures_every_method_over_the_best_peer(tmp_path):
    pytest.importorskip("higher")
    pytest.importorskip("torchopt")
    main(
        [
            "bench-unroll",
            "--out",
            str(tmp_path),
            *flags(SMALL | NARROW),
            "--no-compiled",
            "--no-isolated",
            "--no-jax",
            "--checked",
            "3",
            "5",
        ]
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    for case in ("mlp_t2", "cnn_t2", "deep_t2", "transformer_t2"):
        for method in (*METHODS, "higher"):
            assert summary[f"{case}_{method}_time_vs_best_peer"] > 0
            assert summary[f"{case}_{method}_memory_vs_best_peer"] > 0
            # With Adam higher computes other numbers: it adds eps elsewhere.
            other = (case, method) == ("transformer_t2", "higher")
            assert summary[f"{case}_{method}_error"] < (0.1 if other else 1e-10)
        assert summary[f"{case}_{summary[f'{case}_best_peer_memory']}_memory_vs_best_peer"] == 1.0
    for net in ("mlp", "cnn"):  # they hold one step more at the most, however many there are
        assert summary[f"checks_{net}_eager_t3_bytes"] == summary[f"checks_{net}_eager_t5_bytes"]
    assert {
        f"checks_{net}_{kind}_t3_percent" for net in ("mlp", "cnn") for kind in ("eager", "first")
    } <= summary.keys()
    assert summary["cnn_time_vs_plain_training"] == summary["cnn_t2_fast_time_vs_training"]
    assert summary["time_t2_over_t1"] > 0
    for way in ("mlp_penalty_eager", "cnn_weights_sqrt_eager"):
        assert summary[f"leaf_{way}_time"] > 0
        assert summary[f"leaf_{way}_memory"] > 0
    assert summary["small_t3_forward_time_vs_all"] > 0
    assert summary["reversible_memory_t10_over_t1"] > 0
    assert summary["reversible_bits_per_parameter_step"] == 6.4  # one word of 64 bits, over ten steps
    assert "| torchopt |" in (tmp_path / "tables.md").read_text()
    assert (tmp_path / "unroll.png").stat().st_size > 10_000
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("mlp_t2/frugal")[-1].step == 0


def test_long_horizons_are_measured_alone_without_the_peers_and_their_ways_agree(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchopt", None)
    sizes = flags(SMALL | NARROW)
    main(["bench-unroll", "--out", str(tmp_path), *sizes, "--only-long-horizons", "--no-isolated"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    figures = ("seconds", "time_vs_all", "mib", "error")
    assert list(summary) == [f"small_t3_{way}_{figure}" for way in WAYS for figure in figures]
    assert all(summary[f"small_t3_{way}_error"] < 1e-10 for way in WAYS)
    assert "| forward |" in (tmp_path / "tables.md").read_text()


def test_jax_gives_the_numbers_of_the_loop_and_takes_turns_with_ours(tmp_path):
    pytest.importorskip("jax")
    alone = ["--only-jax", "--nets", "mlp", "cnn", "transformer", "--no-compiled", "--no-isolated"]
    # In another process: the threads of JAX would make a warning of every fork of this one.
    fresh({}, main, ["bench-unroll", "--out", str(tmp_path), *flags(SMALL | NARROW), *alone])
    summary = json.loads((tmp_path / "summary.json").read_text())
    for case in ("mlp_t2", "cnn_t2", "transformer_t2"):
        assert summary[f"{case}_fast_time_vs_jax"] > 0
        for way in ("jax", "jax_checkpointed"):
            assert summary[f"{case}_{way}_error"] < 1e-4  # in single precision, as the loop
        best = summary[f"{case}_best_jax"].replace(", ", "_")
        assert summary[f"{case}_{best}_time_vs_jax"] == 1.0
    assert "| jax, checkpointed |" in (tmp_path / "tables.md").read_text()


def test_compiling_is_timed_in_new_processes_over_jax(tmp_path):
    pytest.importorskip("jax")
    alone = ["--only-compiling", "--nets", "mlp", "--no-compiled"]
    main(["bench-unroll", "--out", str(tmp_path), *flags(SMALL | NARROW), *alone])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0 < summary["mlp_jax_compile_seconds_warm"] < summary["mlp_jax_compile_seconds"]
    assert abs(summary["mlp_compile_seconds"]) < 1  # nothing was compiled
    for figure in ("over_jax", "over_jax_warm", "warm_over_jax_cold"):
        assert f"mlp_compile_seconds_{figure}" in summary
    assert "| mlp |" in (tmp_path / "tables.md").read_text()


def test_a_missing_peer_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchopt", None)
    with pytest.raises(SystemExit, match=r"^bench-unroll needs torchopt, which is not installed") as exit:
        main(["bench-unroll"])
    assert str(exit.value).endswith(': pip install "metafop[peers]".')
