"""The environment: its landscape stays, its starts differ, and a repeated episode is the same to the bit."""

import copy
import warnings

import numpy as np
import pytest
from gymnasium.envs.box2d.bipedal_walker import BipedalWalker
from gymnasium.utils.env_checker import check_env

from experiments.paper.bipedal import environment
from experiments.paper.bipedal.environment import ROUGHNESS, FixedTerrainWalker, VectorEnvironment

TERRAINS = list(ROUGHNESS)


def actions(count, seed=0, shape=(4,)):
    """Random ones, that push forwards: no biped stands them for long."""
    return np.random.default_rng(seed).uniform(0, 1, (count, *shape)).astype(np.float32)


@pytest.mark.parametrize("terrain", TERRAINS)
def test_gymnasium_takes_it_for_an_environment(terrain):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bounds on observations that BipedalWalker itself oversteps
        check_env(FixedTerrainWalker(terrain, 0, render_mode="rgb_array"), skip_render_check=True)


@pytest.mark.parametrize("terrain", TERRAINS)
def test_the_landscape_is_the_same_in_every_episode_and_another_for_another_seed(terrain):
    one, same, other = (
        FixedTerrainWalker(terrain, 3),
        FixedTerrainWalker(terrain, 3),
        FixedTerrainWalker(terrain, 4),
    )
    seen = [(one.reset(seed=0), one.terrain_y)[1], (one.reset(), one.terrain_y)[1]]
    same.reset(seed=9)
    other.reset(seed=0)
    assert seen[0] == seen[1] == same.terrain_y
    assert seen[0] != other.terrain_y


def test_the_rough_terrain_is_rougher():
    steps = {}
    for terrain in TERRAINS:
        one = FixedTerrainWalker(terrain, 0)
        one.reset(seed=0)
        steps[terrain] = np.abs(np.diff(one.terrain_y)).mean()
    assert steps["rough"] > 1.5 * steps["standard"]


def test_start_and_push_differ_between_episodes():
    one = FixedTerrainWalker("standard", 0)
    starts, speeds = [], []
    for i in range(20):
        one.reset(seed=0 if i == 0 else None)
        assert one.hull is not None
        starts.append(one.hull.position[0])
        speeds.append(one.hull.linearVelocity[0])
    middle = environment.bipedal_walker.TERRAIN_STEP * environment.bipedal_walker.TERRAIN_STARTPAD / 2
    assert len(set(starts)) == len(set(speeds)) == 20
    assert np.abs(np.array(starts) - middle).max() < 1.1 * environment.START_OFFSET


def test_the_first_reward_does_not_pay_for_the_start():
    one = FixedTerrainWalker("standard", 0)
    for i in range(5):
        one.reset(seed=i)
        _, reward, *_ = one.step(np.zeros(4, np.float32))
        assert abs(reward) < 1


def test_but_for_start_and_landscape_it_is_gymnasiums(monkeypatch):
    monkeypatch.setattr(environment, "START_OFFSET", 0.0)
    ours, theirs = FixedTerrainWalker("standard", 0), BipedalWalker()
    ours.reset(seed=0)
    theirs.np_random = np.random.default_rng((0, 0))
    slopes = np.random.default_rng(0)
    drawn, generate = theirs.np_random, theirs._generate_terrain

    def on_our_landscape(hardcore):
        theirs.np_random = slopes
        generate(hardcore)
        theirs.np_random = drawn

    theirs._generate_terrain = on_our_landscape
    theirs.reset()
    theirs.step(np.zeros(4))  # ours stands for a step, after it was moved
    for action in actions(100):
        expected, reward, terminated, *_ = theirs.step(action)
        found = ours.step(action)
        assert np.array_equal(found[0], expected)
        assert found[1:3] == (reward, terminated)
        if terminated:
            break


def test_an_episode_is_out_of_time_after_so_many_steps(monkeypatch):
    assert environment.MAX_STEPS == 2000
    monkeypatch.setattr(environment, "MAX_STEPS", 20)
    one = FixedTerrainWalker("standard", 0)
    one.reset(seed=0)
    ends = [one.step(np.zeros(4, np.float32))[2:4] for _ in range(20)]
    assert ends == [(False, False)] * 19 + [(False, True)]


def test_environments_that_were_saved_go_on_to_the_same_bits():
    ours, others = (VectorEnvironment(3, "rough", 1) for _ in range(2))
    ours.reset(seed=[5, 6, 7])
    others.reset(seed=[1, 2, 3])
    for action in actions(300, shape=(3, 4)):
        ours.step(action)
    for other, one in zip(others.each, ours.each, strict=True):
        other.load_state_dict(one.state_dict())
    ended = 0
    for action in actions(300, seed=1, shape=(3, 4)):
        left, right = ours.step(action), others.step(action)
        assert all(np.array_equal(x, y) for x, y in zip(left[:4], right[:4], strict=True))
        ended += left[2].sum()
    assert ended > 0


def test_a_copy_has_the_same_landscape():
    one = FixedTerrainWalker("rough", 7)
    other = copy.deepcopy(one)
    one.reset(seed=2)
    other.reset(seed=2)
    assert one.terrain_y == other.terrain_y


def test_what_was_seen_last_in_an_episode_is_kept_apart_from_the_next_one():
    ours = VectorEnvironment(2, "standard", 0)
    ours.reset(seed=[0, 1])
    alone = FixedTerrainWalker("standard", 0)
    alone.reset(seed=0)
    for action in actions(500, shape=(2, 4)):
        observations, _, terminated, _, info = ours.step(action)
        last, *_ = alone.step(action[0])
        if terminated[0]:
            assert np.array_equal(info["final_obs"][0], last)
            assert np.array_equal(observations[0], alone.reset()[0])
            return
        assert np.array_equal(observations[0], last)
    pytest.fail("No episode ended.")
