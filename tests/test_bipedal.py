"""The study of the biped: its command and its record, runs that are killed, and runs that diverge."""

import importlib.util
import json
import math
import multiprocessing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from killing import assert_kills_change_no_bit
from matplotlib.figure import Figure
from PIL import Image
from problems import refusal
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch.utils.tensorboard import SummaryWriter

from experiments.__main__ import main
from experiments.paper.bipedal import command as bipedal
from experiments.paper.bipedal import environment as walker
from experiments.paper.bipedal import report as gaits
from experiments.paper.bipedal.normalization import Scales
from experiments.paper.bipedal.ppo import Settings
from experiments.paper.bipedal.task import Walk
from experiments.paper.bipedal.training import Walking
from experiments.reporting.medians import median
from experiments.runner import runs, study

pytestmark = pytest.mark.usefixtures("single_precision")
TASK = Walk(
    method="fop",
    lr=1e-3,
    seed=1,
    terrain="rough",
    landscape=0,
    steps=24 * 64,
    environments=2,
    ppo=Settings(horizon=32, epochs=1),
    through="optim",
)


@pytest.mark.parametrize("through", ["optim", "functional"])
def test_a_run_killed_at_ten_random_moments_ends_with_the_bits_of_an_undisturbed_one(through, tmp_path):
    assert_kills_change_no_bit(replace(TASK, through=through), tmp_path)


@pytest.mark.parametrize("through", ["optim", "functional"])
def test_what_fop_has_learned_is_written_for_tensorboard(through, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.paper.bipedal.training.LOOKED_AT_EVERY", 2)
    [one] = study.carry_out([replace(TASK, through=through)], tmp_path, workers=1)
    found = gaits.extremes(one)
    assert (found[:, 0] < found[:, 1]).all()


def test_the_command_writes_a_figure_tables_and_films(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.paper.bipedal.training.LOOKED_AT_EVERY", 2)
    main(["bipedal", "--preset", "smoke", "--out", str(tmp_path), "--methods", "momentum", "adam-sb3", "fop"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    for name in ("momentum", "adam-sb3", "fop"):
        assert -200 < summary[f"rough_{name}_best"] < 350
        assert summary[f"standard_{name}_diverged"] == 0
        assert summary[f"standard_{name}_steps_per_second"] > 0
        assert -200 < summary[f"elsewhere_{name}"] < 350
    assert "standard_fop_over_momentum_late" in summary
    assert 0 < summary["standard_fop_smallest_value"] <= 1 < summary["standard_fop_largest_value"] < 10
    assert summary["rough_film"].endswith("seed 0")
    assert (tmp_path / "bipedal.png").stat().st_size > 10_000
    with Image.open(tmp_path / "rough.gif") as picture:
        picture.seek(1)  # there is a second frame
        assert picture.size == (300, 200)
    assert "The rough terrain" in capsys.readouterr().out


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


def test_a_method_of_which_runs_diverged_at_once_is_drawn_without_them(tmp_path):
    tasks = [replace(TASK, method="momentum", scored=1, lr=lr, steps=8 * 64) for lr in (1e30, 1e-3)]
    done = study.carry_out(tasks, tmp_path, workers=1)
    axes = Figure().subplots()
    gaits.curve(axes, "momentum", done)
    gaits.curve(axes, "adam", done[:1])
    said = [line.get_label() for line in axes.lines]
    assert said == ["momentum (1 of 2 runs)", "Adam (0 of 1 runs)"]
    assert np.size(axes.lines[0].get_xdata()) > 0


def test_what_comes_after_a_step_is_what_the_next_one_sees_but_where_an_episode_ends(monkeypatch):
    """A fall ends one, and so does time; what was seen last is then no longer what is seen next."""
    monkeypatch.setattr(walker, "LIMIT", 60)
    walking = Walking(replace(TASK, environments=8, ppo=Settings(horizon=128)))
    alone = [walker.Walker("rough", 0) for _ in range(8)]
    rollout, returns = walking._walk()
    same = (rollout.after[:-1] == rollout.observations[1:]).all(-1)
    assert torch.equal(same, ~rollout.ended[:-1])
    assert rollout.terminated.any()
    assert (rollout.ended & ~rollout.terminated).any()
    assert len(returns) == rollout.ended.sum()
    # The same actions, walked alone, end where those did.
    for i, one in enumerate(alone):
        one.reset(seed=TASK.seed * 8 + i)
        for action, terminated, ended in zip(
            rollout.actions[:, i], rollout.terminated[:, i], rollout.ended[:, i], strict=True
        ):
            _, _, fell, late, _ = one.step(action.numpy())
            assert (fell, fell or late) == (bool(terminated), bool(ended))
            if ended:
                one.reset()


def test_scales_are_those_of_stable_baselines(monkeypatch):
    """Step for step, over episodes that end."""
    monkeypatch.setattr(walker, "LIMIT", 7)
    many: Any = [lambda: walker.Walker("standard", 0)] * 3
    theirs, ours = VecNormalize(DummyVecEnv(many), gamma=0.99), Scales(3, 0.99)
    theirs.reset()
    ours.observe(np.asarray(theirs.get_original_obs()))
    for _ in range(30):
        found, rewards, ended, _ = theirs.step(np.zeros((3, 4), np.float32))
        seen = ours.observe(np.asarray(theirs.get_original_obs()))
        scaled = ours.reward(theirs.get_original_reward(), ended)
        torch.testing.assert_close(seen, torch.as_tensor(np.asarray(found)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scaled, torch.as_tensor(rewards), rtol=1e-4, atol=1e-4)


def test_what_is_not_installed_is_said_in_one_sentence(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(bipedal, "find_spec", lambda name: None if name == "Box2D" else found(name))
    said = refusal(bipedal.main, bipedal.PRESETS["smoke"])
    assert said == 'bipedal needs Box2D, not installed here. Run: pip install "metafop[rl]"'


def test_other_experiments_do_not_need_what_it_needs():
    """Their modules are all imported, whichever is asked for."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('gymnasium', 'Box2D', 'stable_baselines3'))\n"
        "import experiments.paper.bipedal.command, experiments.paper.cifar10"
    )
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(code,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_observations_become_standard_and_rewards_small():
    scales, random = Scales(8, 0.9), np.random.default_rng(0)
    for _ in range(500):
        scales.observe(random.normal(3, 2, (8, 24)))
        scales.reward(random.normal(0, 5, 8), np.zeros(8, bool))
    seen = scales.standard(random.normal(3, 2, (8, 24)))
    rewards = scales.reward(random.normal(0, 5, 8), np.zeros(8, bool))
    assert abs(seen.mean()) < 0.3
    assert 0.8 < seen.std() < 1.2
    # The sum of rewards of deviation 5, discounted by 0.9, has one of 5 / sqrt(1 - 0.81).
    assert 0.2 < rewards.std() < 0.8


def test_what_is_discounted_ends_with_its_episode():
    scales = Scales(2, 1.0)
    for _ in range(3):
        scales.reward(np.ones(2), np.array([True, False]))
    assert scales.state_dict()["sums"].tolist() == [0.0, 3.0]


def test_a_median_has_the_interval_of_its_bootstrap_and_of_few_seeds_that_is_their_range():
    found = median(torch.tensor([[1.0], [2.0], [7.0]]))
    assert [x.item() for x in found] == [2.0, 1.0, 7.0]
    many = median(torch.arange(101.0)[:, None])
    assert many.middle.item() == 50.0
    assert 25 < many.low.item() < 45 < 55 < many.high.item() < 75


def test_the_size_of_p_is_the_last_that_was_written_even_if_a_run_was_resumed(tmp_path):
    for value in (2.0, 3.0):
        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_scalar("eigenvalue_max/value.weight", value, 49)
    found = gaits.extremes(runs.Finished(None, tmp_path, {}))
    assert found[3, 1] == 3
    assert found.isnan().sum() == 7


def test_late_scores_are_those_of_the_last_fifth_and_a_run_that_diverged_has_none(tmp_path):
    scores = ["", "", *range(2, 10)]
    (tmp_path / "metrics.csv").write_text(
        "step,score\n" + "".join(f"{i},{x}\n" for i, x in enumerate(scores))
    )
    both = [runs.Finished(None, tmp_path, {"diverged": diverged}) for diverged in (False, True)]
    assert gaits.mean_score(both, 0.2).nan_to_num(-1).tolist() == [8.5, -1]
    assert gaits.mean_score(both, 1.0).nan_to_num(-1).tolist() == [5.5, -1]


def test_a_pair_of_which_one_has_no_score_is_not_counted():
    figures, said = gaits.compared(torch.tensor([1.0, torch.nan, -2.0]), "x")
    assert figures == {"x": None, "x_low": None, "x_high": None, "x_p": None, "x_ahead": "1 of 2"}
    assert said == "– (– to –; p –; 1 of 2)"


def test_the_steps_to_a_return_are_those_at_which_the_best_policy_first_has_it(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,steps,best\n0,10,\n1,20,-5\n2,30,201\n3,40,250\n")
    assert gaits.steps_to(runs.Finished(None, tmp_path, {})) == 30
    (tmp_path / "metrics.csv").write_text("step,steps,best\n0,10,\n1,20,-5\n")
    assert gaits.steps_to(runs.Finished(None, tmp_path, {})) == math.inf


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"steps": 63}, "got steps=63"), ({"ppo": Settings(horizon=32, minibatch=65)}, "got 65")],
)
def test_what_cannot_be_walked_or_learned_from_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(TASK, **changes)
    with pytest.raises(ValueError, match="steps=100"):
        bipedal.Config(steps=100)


@pytest.mark.parametrize(
    "changes", [{"seeds": 0}, {"rough_seeds": -1}, {"methods": ("fop", "fop")}, {"methods": ()}]
)
def test_a_study_that_compares_nothing_or_the_same_twice_is_refused(changes):
    with pytest.raises(ValueError, match=f"got .*{next(iter(changes))}="):
        bipedal.Config(**changes)


def test_a_terrain_without_seeds_is_left_out(tmp_path, capsys):
    main(["bipedal", "--preset", "smoke", "--out", str(tmp_path), "--methods", "adam", "--rough-seeds", "0"])
    assert "rough" not in (tmp_path / "tables.md").read_text()
    assert sorted(path.name for path in tmp_path.glob("*.gif")) == ["standard.gif"]
