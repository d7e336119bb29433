"""The return of a saved policy: from starts, or on landscapes, that it was not trained on."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from experiments.paper.bipedal.environment import FixedTerrainWalker
from experiments.paper.bipedal.normalization import RunningNormalizer
from experiments.paper.bipedal.ppo import Policy
from experiments.paper.bipedal.settings import RunSettings
from experiments.runner.runs import Finished

EPISODES = 20
UNSEEN = 1_000_000  # added to a seed, for starts that were not trained on

Act = Callable[[NDArray[Any]], NDArray[Any]]  # from observations to actions


def mean_actions(best: dict[str, Any]) -> Act:
    """Return the function from an observation to the mean action of a saved policy."""
    policy, normalizer = Policy(observations=24, actions=4), RunningNormalizer(1, 1.0)
    policy.load_state_dict(best["policy"])
    normalizer.load_state_dict(best["scales"])

    @torch.no_grad()
    def act(observation: NDArray[Any]) -> NDArray[Any]:
        return policy(normalizer.normalize(observation)).mean.numpy()

    return act


def mean_return(task: RunSettings, best: dict[str, Any]) -> float:
    """Return the mean return of a saved policy, from starts that it was not trained on."""
    return _mean_return(FixedTerrainWalker(task.terrain, task.landscape), best, task.seed)


def return_on_new_landscapes(one: Finished) -> float:
    """Return the mean return of the best policy of a run, on landscapes that it was not trained on."""
    best = torch.load(one.folder / "best.pt", weights_only=True)
    return _mean_return(gymnasium.make("BipedalWalker-v3"), best, one.task.seed)


def _mean_return(environment: gymnasium.Env[Any, Any], best: dict[str, Any], seed: int) -> float:
    act = mean_actions(best)
    environment.reset(seed=seed + UNSEEN)
    return float(np.mean([sum(episode_rewards(environment, act)) for _ in range(EPISODES)]))


def episode_rewards(environment: gymnasium.Env[Any, Any], act: Act) -> Iterator[float]:
    """Yield the rewards of the next episode."""
    observation, _ = environment.reset()
    ended = False
    while not ended:
        observation, reward, terminated, truncated, _ = environment.step(act(observation))
        ended = terminated or truncated
        yield float(reward)
