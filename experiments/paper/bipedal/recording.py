"""An episode of a saved policy, as a moving picture."""

from pathlib import Path

import torch
from gymnasium.envs.box2d.bipedal_walker import FPS
from PIL import Image

from experiments.paper.bipedal.environment import FixedTerrainWalker
from experiments.paper.bipedal.evaluation import UNSEEN, episode_rewards, mean_actions
from experiments.runner.runs import Finished

FRAME_EVERY, SIZE, COLOURS = 6, (300, 200), 16  # steps, pixels, colours


def record_episode(path: Path, one: Finished) -> None:
    """Write the first evaluation episode of the best policy of a run as a GIF."""
    environment = FixedTerrainWalker(one.task.terrain, one.task.landscape, render_mode="rgb_array")
    environment.reset(seed=one.task.seed + UNSEEN)
    act = mean_actions(torch.load(one.folder / "best.pt", weights_only=True))
    frames = (
        Image.fromarray(environment.picture())
        for i, _ in enumerate(episode_rewards(environment, act))
        if i % FRAME_EVERY == 0
    )
    first, *others = (picture.resize(SIZE).quantize(COLOURS) for picture in frames)
    duration = round(1000 * FRAME_EVERY / FPS)
    first.save(path, save_all=True, append_images=others, duration=duration, loop=0)
