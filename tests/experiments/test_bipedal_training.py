"""Runs of the biped: killed ones resume to the same bits, and those that diverge end with a record."""

from dataclasses import replace

import pytest
import torch
from bipedal_task import TASK
from killing import assert_kills_change_no_bit

from experiments.paper.bipedal import environment, report
from experiments.paper.bipedal.ppo import Settings
from experiments.paper.bipedal.training import TrainingRun
from experiments.runner import study

pytestmark = pytest.mark.usefixtures("single_precision")


@pytest.mark.parametrize("through", ["optim", "functional"])
def test_a_run_killed_at_ten_random_moments_ends_with_the_bits_of_an_undisturbed_one(through, tmp_path):
    assert_kills_change_no_bit(replace(TASK, through=through), tmp_path)


@pytest.mark.parametrize("through", ["optim", "functional"])
def test_what_fop_has_learned_is_written_for_tensorboard(through, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.paper.bipedal.training.DIAGNOSTICS_EVERY", 2)
    [one] = study.carry_out([replace(TASK, through=through)], tmp_path, workers=1)
    found = report.extremes(one)
    assert (found[:, 0] < found[:, 1]).all()


@pytest.mark.parametrize("through", ["optim", "functional"])
@pytest.mark.parametrize("method", ["momentum", "adam", "fop-paper", "fop", "adam-sb3"])
def test_a_policy_that_diverges_ends_its_run_with_a_record_and_the_others_go_on(
    method, through, tmp_path, capsys
):
    task = replace(TASK, method=method, through=through, steps=6 * 64)
    first, second = study.carry_out([replace(task, lr=1e30), task], tmp_path, workers=1)
    assert first.result["diverged"]
    assert first.result["steps"] < task.steps
    assert len(first.metrics()["step"]) * 64 <= first.result["steps"]
    assert not second.result["diverged"]
    assert second.result["steps"] == task.steps
    assert "DIVERGED" in capsys.readouterr().out


def test_what_comes_after_a_step_is_what_the_next_one_sees_but_where_an_episode_ends(monkeypatch):
    """A fall ends one, and so does time; what was seen last is then no longer what is seen next."""
    monkeypatch.setattr(environment, "MAX_STEPS", 60)
    run = TrainingRun(replace(TASK, environments=8, ppo=Settings(horizon=128)))
    alone = [environment.FixedTerrainWalker("rough", 0) for _ in range(8)]
    rollout, returns = run._collect()
    same = (rollout.after[:-1] == rollout.observations[1:]).all(-1)
    assert torch.equal(same, ~rollout.ended[:-1])
    assert rollout.terminated.any()
    assert (rollout.ended & ~rollout.terminated).any()
    assert len(returns) == rollout.ended.sum()
    # The same actions, taken in one environment each, end where those did.
    for i, one in enumerate(alone):
        one.reset(seed=TASK.seed * 8 + i)
        for action, terminated, ended in zip(
            rollout.actions[:, i], rollout.terminated[:, i], rollout.ended[:, i], strict=True
        ):
            _, _, fell, late, _ = one.step(action.numpy())
            assert (fell, fell or late) == (bool(terminated), bool(ended))
            if ended:
                one.reset()
