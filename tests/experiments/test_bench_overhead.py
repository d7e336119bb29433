"""bench-overhead runs from its command, and its figures are those that its docstrings define."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Generator, nn

from experiments.__main__ import main
from experiments.benchmarks.overhead.config import Config, nets
from experiments.benchmarks.overhead.measure import OURS, PEERS, Net, Times, bytes_of, memory_of, overheads

SMALL = ["--repeats", "2", "--periods", "1", "--batch", "2", "--scale", "0.1"]
CONV = ("cnn9_16_32", "cnn9_96_192", "resnet18")


def test_bench_overhead_measures_every_optimizer_on_every_net(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    main(["bench-overhead", "--out", str(tmp_path), *SMALL, "--no-memory"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    headlines = ["cnn9_16_32", "cnn9_96_192", "mlp_rank4", "mlp_rank64"]
    assert list(summary)[:6] == [
        *(f"{name}_overhead_percent" for name in headlines),
        "cnn9_overhead_vs_soap",
        "extra_memory_over_base",
    ]
    assert summary["extra_memory_over_base"] is None
    on_mlp = [f"mlp_{method}" for method in (*OURS, *PEERS) if method != "fop"]
    on_conv = [f"{net}_{method}" for net in CONV for method in ("paper", *PEERS) if method != "muon"]
    for name in [*CONV, *on_mlp, *on_conv]:
        low, high = (summary[f"{name}_overhead_percent_{end}"] for end in ("low", "high"))
        assert low <= summary[f"{name}_overhead_percent"] <= high
    assert [summary[f"{name}_muon_overhead_percent"] for name in CONV] == [None] * 3
    assert summary["mlp_muon_overhead_percent"] > 0
    assert "| rank64 every step |" in (tmp_path / "tables.md").read_text()
    assert (tmp_path / "overhead.png").stat().st_size > 10_000
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("mlp/soap")[-1].step == 19
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("resnet18/fop")[-1].step == 9


def test_bench_overhead_measures_memory_in_processes_of_their_own(tmp_path):
    main(["bench-overhead", "--out", str(tmp_path), *SMALL, "--nets", "cnn9_16_32", "--no-peers"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["extra_memory_over_base"] == summary["cnn9_16_32_extra_memory_over_base"] > 0.5
    assert summary["cnn9_16_32_extra_held_over_base"] >= summary["extra_memory_over_base"]
    assert summary["cnn9_16_32_extra_peak_over_base"] > 0
    assert summary["cnn9_overhead_vs_soap"] is None


def test_the_state_of_adam_is_one_more_tensor_of_each_parameter_than_that_of_momentum():
    net = nets(Config(scale=0.1))["mlp"]
    sgd, adam = memory_of(net, "sgd"), memory_of(net, "adam")
    assert sgd.state == sgd.params
    assert adam.state == 2 * adam.params + bytes_of([torch.zeros(()) for _ in net.model().parameters()])
    assert (sgd.held, adam.held) == (sgd.state, adam.state)
    assert adam.peak > sgd.peak > sgd.state + sgd.params  # gradients


def test_what_tensors_share_counts_once():
    x = torch.zeros(10, dtype=torch.float32)
    assert bytes_of([x, {"rows": [x[:3], x[3:]]}, None, 1, torch.zeros(2, dtype=torch.float64)]) == 40 + 16


def test_an_overhead_is_the_median_over_periods_of_the_mean_over_each_above_sgd():
    net = Net(lambda: nn.Identity(), (), ("sgd", "soap"), ("soap",), turn=10, rounds=3, few=3)
    tenth = [1.0] * 9 + [11.0]  # 2 on the mean
    times = {"sgd": Times([7.0] * 30, [1.0] * 30), "soap": Times([7.0] * 30, tenth * 2 + [100.0] * 10)}
    found = overheads(net, times, Generator().manual_seed(0))["soap"]
    assert (found.seconds, found.percent) == pytest.approx((2.0, 100 * (2 - 1) / (7 + 1)))
    assert (found.low, found.high) == pytest.approx((12.5, 100 * 99 / 8))


def test_too_few_rounds_are_refused():
    with pytest.raises(SystemExit, match=r"--repeats of 2 or more.* got 1 and 2"):
        main(["bench-overhead", "--no-peers", "--repeats", "1"])
