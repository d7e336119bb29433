"""Observations are normalized and rewards scaled as by Stable-Baselines3."""

from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from experiments.paper.bipedal import environment
from experiments.paper.bipedal.normalization import RunningNormalizer

pytestmark = pytest.mark.usefixtures("single_precision")


def test_normalization_is_that_of_stable_baselines(monkeypatch):
    """Step for step, over episodes that end."""
    monkeypatch.setattr(environment, "MAX_STEPS", 7)
    many: Any = [lambda: environment.FixedTerrainWalker("standard", 0)] * 3
    theirs, ours = VecNormalize(DummyVecEnv(many), gamma=0.99), RunningNormalizer(3, 0.99)
    theirs.reset()
    ours.observe(np.asarray(theirs.get_original_obs()))
    for _ in range(30):
        found, rewards, ended, _ = theirs.step(np.zeros((3, 4), np.float32))
        seen = ours.observe(np.asarray(theirs.get_original_obs()))
        scaled = ours.scale_reward(theirs.get_original_reward(), ended)
        torch.testing.assert_close(seen, torch.as_tensor(np.asarray(found)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scaled, torch.as_tensor(rewards), rtol=1e-4, atol=1e-4)


def test_observations_become_standard_and_rewards_small():
    normalizer, random = RunningNormalizer(8, 0.9), np.random.default_rng(0)
    for _ in range(500):
        normalizer.observe(random.normal(3, 2, (8, 24)))
        normalizer.scale_reward(random.normal(0, 5, 8), np.zeros(8, bool))
    seen = normalizer.normalize(random.normal(3, 2, (8, 24)))
    rewards = normalizer.scale_reward(random.normal(0, 5, 8), np.zeros(8, bool))
    assert abs(seen.mean()) < 0.3
    assert 0.8 < seen.std() < 1.2
    # The sum of rewards of deviation 5, discounted by 0.9, has one of 5 / sqrt(1 - 0.81).
    assert 0.2 < rewards.std() < 0.8


def test_what_is_discounted_ends_with_its_episode():
    normalizer = RunningNormalizer(2, 1.0)
    for _ in range(3):
        normalizer.scale_reward(np.ones(2), np.array([True, False]))
    assert normalizer.state_dict()["sums"].tolist() == [0.0, 3.0]
