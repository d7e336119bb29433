"""BipedalWalker-v3 with the same landscape in every episode, and another start in each."""

from collections.abc import Callable
from typing import Any

import Box2D
import numpy as np
import torch
from gymnasium.envs.box2d import bipedal_walker
from gymnasium.envs.box2d.bipedal_walker import BipedalWalker
from gymnasium.utils import EzPickle
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from experiments.paper.bipedal.settings import Terrain

ROUGHNESS: dict[Terrain, float] = {"standard": 1.0, "rough": 2.0}  # times the slopes of BipedalWalker-v3
MAX_STEPS = 2000  # steps of an episode, the paper's
START_OFFSET = 0.25 * bipedal_walker.TERRAIN_STEP * bipedal_walker.TERRAIN_STARTPAD  # to either side, at most


class TerrainGenerator:
    """The random generator of a landscape, whose slopes are multiplied by `roughness`."""

    def __init__(self, seed: int, roughness: float) -> None:
        self._generator, self._roughness = np.random.default_rng(seed), roughness

    def uniform(self, low: float, high: float) -> float:
        return self._roughness * self._generator.uniform(low, high)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


class FixedTerrainWalker(BipedalWalker):
    """A biped whose landscape is drawn from one seed, and the start and push of an episode from another.

    That other is the seed of the first reset, 0 if it has none. Each episode has its own Box2D world, which
    depends on the seed, the episode's number and the actions alone. So an environment resumes where another
    stopped, to the bit, by taking the same actions again.
    """

    def __init__(self, terrain: Terrain, landscape: int, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        EzPickle.__init__(self, terrain, landscape, render_mode)  # a copy is made of these
        self._terrain_generator: Callable[[], Any] = lambda: TerrainGenerator(landscape, ROUGHNESS[terrain])
        self._seed, self._episode = 0, -1
        self._actions: list[NDArray[np.float32]] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        if seed is not None:
            self._seed, self._episode = seed, -1
        self._episode += 1
        self.np_random = np.random.default_rng((self._seed, self._episode))
        self._destroy()
        self.world = Box2D.b2World()  # an old one keeps more of its past than its bodies
        super().reset()
        aside = self.np_random.uniform(-START_OFFSET, START_OFFSET)
        assert self.hull is not None
        for body in (self.hull, *self.legs):
            body.position = (body.position[0] + aside, body.position[1])
        self.prev_shaping, self._actions = None, []
        observation, *_ = super().step(np.zeros(4))
        return observation, {}

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, action: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._actions.append(np.array(action, np.float32))
        observation, reward, terminated, _, info = super().step(self._actions[-1])
        return observation, float(reward), terminated, len(self._actions) >= MAX_STEPS, info

    def picture(self) -> NDArray[np.uint8]:
        pixels = self.render()
        assert pixels is not None  # with render_mode="rgb_array"
        return pixels

    def state_dict(self) -> dict[str, Any]:
        actions = torch.tensor(np.array(self._actions)).view(-1, 4)
        return {"seed": self._seed, "episode": self._episode, "actions": actions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed, self._episode = state["seed"], state["episode"] - 1
        self.reset()
        for action in state["actions"].numpy():
            self.step(action)

    def _generate_terrain(self, hardcore: bool) -> None:
        drawn, self.np_random = self.np_random, self._terrain_generator()
        super()._generate_terrain(hardcore)
        self.np_random = drawn


class VectorEnvironment(SyncVectorEnv):
    """Environments side by side; one whose episode ends begins the next within the same step."""

    def __init__(self, count: int, terrain: Terrain, landscape: int) -> None:
        self.each = [FixedTerrainWalker(terrain, landscape) for _ in range(count)]
        make = [lambda one=one: one for one in self.each]
        super().__init__(make, autoreset_mode=AutoresetMode.SAME_STEP)
