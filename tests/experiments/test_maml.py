"""`maml` runs from its command; every way to differentiate gives the numbers of higher."""

import sys

import pytest
from commands import smoke
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.__main__ import main

OURS = ("metafop_compiled", "metafop_adjoint", "metafop_autograd", "torch_func_by_hand")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    pytest.importorskip("higher")
    return tmp_path_factory.mktemp("maml")


@pytest.mark.usefixtures("single_precision")
def test_maml_learns_starts_and_compares_every_way_with_higher(out):
    summary, tables = smoke("maml", out)
    for steps in (1, 5):
        for way in OURS:
            assert summary[f"t{steps}_{way}_gradient_error"] < 1e-12
            assert summary[f"t{steps}_{way}_curve_error"] < 1e-4
            assert summary[f"t{steps}_{way}_time_vs_higher"] > 0
            assert summary[f"t{steps}_{way}_memory_vs_higher"] > 0
        assert summary[f"t{steps}_higher_time_vs_higher"] == 1.0
    for recipe in ("joint", "maml1", "maml5", "rates1"):
        assert summary[f"{recipe}_error_10"] < summary[f"{recipe}_error_0"]
    assert summary["rate_0.weight"] != 0.01
    assert "| start and rates, 1 step |" in tables
    assert (out / "maml.png").stat().st_size > 10_000
    events = EventAccumulator(str(out)).Reload()
    assert events.Scalars("loss/maml5")[-1].step == 19
    assert events.Scalars("unseen/joint")[-1].step == 10


def test_without_higher_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "higher", None)
    with pytest.raises(
        SystemExit, match=r"^maml needs higher, which is not installed: pip .*metafop\[peers\]"
    ):
        main(["maml", "--preset", "smoke", "--out", str(tmp_path)])
