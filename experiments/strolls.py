"""Walks of a policy that was kept: what they return, and how they look."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.box2d.bipedal_walker import FPS
from numpy.typing import NDArray
from PIL import Image

from experiments.ppo import Policy
from experiments.runs import Finished
from experiments.scales import Scales
from experiments.walk import Walk
from experiments.walker import Walker

EPISODES = 20
OTHERS = 1_000_000  # added to a seed, for starts that were not trained on
FRAME_EVERY, SIZE, COLOURS = 6, (300, 200), 16  # of a film: steps, pixels

Steps = Callable[[NDArray[Any]], NDArray[Any]]  # from observations to actions


def strolling(best: dict[str, Any]) -> Steps:
    """Return how a kept policy walks: by its mean actions."""
    policy, scales = Policy(observations=24, actions=4), Scales(1, 1.0)
    policy.load_state_dict(best["policy"])
    scales.load_state_dict(best["scales"])

    @torch.no_grad()
    def act(observation: NDArray[Any]) -> NDArray[Any]:
        return policy(scales.standard(observation)).mean.numpy()

    return act


def mean_return(task: Walk, best: dict[str, Any]) -> float:
    """Return the mean return of a kept policy, from starts that it was not trained on."""
    return _mean_return(Walker(task.terrain, task.landscape), best, task.seed)


def return_elsewhere(one: Finished) -> float:
    """Return that of the best policy of a run, on landscapes that it was not trained on."""
    best = torch.load(one.folder / "best.pt", weights_only=True)
    return _mean_return(gymnasium.make("BipedalWalker-v3"), best, one.task.seed)


def _mean_return(walker: gymnasium.Env[Any, Any], best: dict[str, Any], seed: int) -> float:
    act = strolling(best)
    walker.reset(seed=seed + OTHERS)
    return float(np.mean([sum(stroll(walker, act)) for _ in range(EPISODES)]))


def stroll(walker: gymnasium.Env[Any, Any], act: Steps) -> Iterator[float]:
    """Yield the rewards of the next episode."""
    observation, _ = walker.reset()
    ended = False
    while not ended:
        observation, reward, terminated, truncated, _ = walker.step(act(observation))
        ended = terminated or truncated
        yield float(reward)


def film(path: Path, one: Finished) -> None:
    """Write the first episode that the best policy of a run walks in the end, as a GIF."""
    walker = Walker(one.task.terrain, one.task.landscape, render_mode="rgb_array")
    walker.reset(seed=one.task.seed + OTHERS)
    act = strolling(torch.load(one.folder / "best.pt", weights_only=True))
    shown = (
        Image.fromarray(walker.picture()) for i, _ in enumerate(stroll(walker, act)) if i % FRAME_EVERY == 0
    )
    first, *others = (picture.resize(SIZE).quantize(COLOURS) for picture in shown)
    duration = round(1000 * FRAME_EVERY / FPS)
    first.save(path, save_all=True, append_images=others, duration=duration, loop=0)
