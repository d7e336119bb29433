"""The harness finds what is wrong, says where, and passes what is right."""

import json
from dataclasses import dataclass

import pytest
import torch

from metafop import SGD, Adam, Dense, LowRank, Momentum, Normalized, Rescaled, Scheduled, tree, verify
from metafop.preconditioners import Identity
from metafop.verify.__main__ import main


@dataclass(frozen=True)
class Skewed:
    """A user's family, P = diag(m²) on the last dimension, with a pullback that halves one number."""

    wrong_at: int | None = None

    def init(self, param, generator=None):
        return param.new_ones(param.shape[-1])

    def apply(self, m, grad):
        return grad * m.square()

    def pullback(self, m, grad, cotangent):
        exact = (2 * m * grad * cotangent).sum(0)
        return exact if self.wrong_at is None else exact * (1 - 0.5 * torch.eye(len(m))[self.wrong_at])


@dataclass(frozen=True)
class Doubling(SGD):
    """A user's update rule, twice as fast as the one whose pullback it copied."""

    def update(self, hyper, params, opt, direction):
        return super().update(hyper, params, opt, tree.scale(direction, 2.0))


def test_a_right_family_of_a_users_own_passes():
    report = verify.check(preconditioner=Skewed())
    assert report.ok
    assert max(row.autograd or 0.0 for row in report.rows) < 1e-14


def test_a_wrong_family_is_found_and_the_place_is_named():
    report = verify.check(preconditioner=Skewed(wrong_at=1))
    assert not report.ok
    assert report.worst.worst_at == "precond.w[1]"
    assert (report.worst.autograd or 0.0) > 1e-3
    assert report.worst.differences > 1e-3
    assert "WRONG" in str(report)


@dataclass(frozen=True)
class Backwards(SGD):
    """A user's update rule whose derivative in the direction has the wrong sign."""

    def pullback(self, hyper, params, opt, direction, cotangent):
        d_hyper, d_direction = super().pullback(hyper, params, opt, direction, cotangent)
        return d_hyper, tree.scale(d_direction, -1.0)


def test_a_wrong_derivative_in_the_direction_is_found():
    report = verify.check(optimizer=Backwards(), lr=0.05)
    assert [row.part for row in report.rows if not row.ok] == ["precond.w", "loss.weights", "loss.l2"]


@dataclass(frozen=True)
class Sheared:
    """A user's family whose P is not symmetric: it is a step's own derivative, but not that of its loss."""

    def init(self, param, generator=None):
        return param.new_zeros(())

    def apply(self, m, grad):
        return grad + m * torch.cat([grad[1:], grad[:1]])

    def pullback(self, m, grad, cotangent):
        return (torch.cat([grad[1:], grad[:1]]) * cotangent).sum()


def test_a_preconditioner_that_is_not_symmetric_is_found_by_the_leaves_of_the_loss():
    report = verify.check(preconditioner=Sheared())
    assert [row.part for row in report.rows if not row.ok] == ["loss.weights", "loss.l2"]


def test_leaves_of_the_loss_that_have_a_schedule_pass():
    assert verify.check(Scheduled(Adam(), 4, ("lr", "loss.l2")), lr=0.1).ok


def test_the_time_of_a_rescaled_family_is_not_checked_because_it_is_not_learned():
    report = verify.check(preconditioner=Rescaled(Normalized(Rescaled(Dense(), limit=0.5)), limit=0.7))
    assert report.ok
    assert [row.part for row in report.rows if "time" in row.part] == []


def test_parts_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"starts with one of \('precond.v',\)"):
        verify.check(parts=("precond.v",))


def test_a_wrong_update_rule_is_found_and_its_part_is_named():
    report = verify.check(optimizer=Doubling(), lr=0.05)
    assert {row.part for row in report.rows if not row.ok} >= {"hyper.lr"}


@pytest.mark.parametrize("returned", [torch.nan, torch.inf])
def test_what_is_not_a_number_is_wrong(returned, monkeypatch):
    monkeypatch.setattr(Skewed, "pullback", lambda self, m, grad, cotangent: torch.full_like(m, returned))
    assert not verify.check(preconditioner=Skewed()).ok


def test_a_pullback_of_another_shape_is_refused(monkeypatch):
    monkeypatch.setattr(Skewed, "pullback", lambda self, m, grad, cotangent: m[:1])
    with pytest.raises(ValueError, match=r"precond.w, of shape \(3,\)"):
        verify.check(preconditioner=Skewed())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(1,), (7,), (1, 4), (6, 2), (2, 2, 3)], ids=str)
@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [
        (Momentum(nesterov=True), {"lr": 0.3, "momentum": 0.3}),
        (Adam(), {"lr": 0.3, "betas": (0.9, 0.9)}),
    ],
    ids=["nesterov", "adam"],
)
def test_other_seeds_shapes_and_values_pass_too(optimizer, hyper, shape, seed):
    assert verify.check(optimizer, Dense(), shape, seed=seed, **hyper).ok
    assert verify.check(optimizer, LowRank(1), shape, seed=seed, **hyper).ok
    assert verify.check(optimizer, Identity(), shape, seed=seed, **hyper).ok


def test_the_command_prints_the_table_writes_json_and_exits_with_zero(tmp_path, capsys):
    assert main(["--json", str(tmp_path / "table.json")]) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    printed = capsys.readouterr().out
    assert table["ok"]
    assert all((row["autograd"] or 0) <= 1e-10 and row["differences"] <= 1e-6 for row in table["rows"])
    assert len(table["rows"]) > 500
    rules = {"SGD()", "Momentum(nesterov=True)", "Adam()", "Kronecker()", "Rescaled(family=LowRank(rank=2)"}
    estimators = {"Autograd()", "Adjoint(keep='log')", "ReversibleAdjoint()", "Forward()", "solver=Neumann()"}
    assert [name for name in rules | estimators if name not in printed] == []
    assert {row["part"].partition(".")[0] for row in table["rows"]} == {
        "hyper",
        "precond",
        "loss",
        "gradient",
        "start",
    }


def test_a_wrong_pullback_makes_the_command_exit_with_one(monkeypatch, capsys, tmp_path):
    wrong = [verify.check(), verify.check(preconditioner=Skewed(wrong_at=2))]
    monkeypatch.setattr("metafop.verify.__main__.built_in", lambda: wrong)
    assert main(["--json", str(tmp_path / "table.json")]) == 1
    assert "The worst is precond.w[2] of SGD(), Skewed(wrong_at=2), 4×3." in capsys.readouterr().out
    assert not json.loads((tmp_path / "table.json").read_text())["ok"]
