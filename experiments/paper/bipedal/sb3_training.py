"""A training run by Stable-Baselines3's PPO with the same settings: the reference for ours."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger as NoLogger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import Tensor, nn

from experiments.paper.bipedal.environment import FixedTerrainWalker
from experiments.paper.bipedal.evaluation import mean_return
from experiments.paper.bipedal.normalization import CLIP
from experiments.paper.bipedal.settings import RunSettings
from experiments.runner.runs import Row, save
from metafop.tensorboard import Logger

# Where our policy has what theirs has under another name.
LAYERS = {
    "hidden.0": "features_extractor.hidden.0",
    "hidden.2": "features_extractor.hidden.2",
    "mean": "action_net.0",
    "value": "value_net",
}
NAMES = {f"{ours}.{x}": f"{theirs}.{x}" for ours, theirs in LAYERS.items() for x in ("weight", "bias")}
NAMES["log_std"] = "log_std"


class Hidden(BaseFeaturesExtractor):
    """The layers that actions and value share."""

    def __init__(self, space: Any, features_dim: int = 40) -> None:
        super().__init__(space, features_dim)
        sizes = (space.shape[0], features_dim, features_dim)
        self.hidden = nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:]), nn.Tanh())

    def forward(self, observations: Tensor) -> Tensor:
        return self.hidden(observations)


class Policy(ActorCriticPolicy):
    """Theirs, with tanh around the mean of the actions."""

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_net = nn.Sequential(self.action_net, nn.Tanh())

    def _get_action_dist_from_latent(self, latent_pi: Tensor) -> Any:
        distribution: Any = super()._get_action_dist_from_latent(latent_pi)
        # torch checks this itself, but not in a process that has compiled something.
        if not distribution.distribution.mean.isfinite().all():
            raise ValueError(f"Parameters {_NOT_FINITE} are not finite.")
        return distribution


_NOT_FINITE = "of distribution Normal"  # in what torch says of numbers that are not finite


class SB3TrainingRun:
    """A run in progress. It has no checkpoint of its own: to resume is to repeat all steps so far."""

    def __init__(self, task: RunSettings) -> None:
        self._task, self._seconds, self._diverged = task, 0.0, False
        alone: Any = [lambda: Monitor(FixedTerrainWalker(task.terrain, task.landscape))] * task.environments
        self._environments = VecNormalize(
            DummyVecEnv(alone), clip_obs=CLIP, clip_reward=CLIP, gamma=task.ppo.discount
        )
        self.ppo = PPO(
            Policy,
            self._environments,
            learning_rate=task.lr,
            n_steps=task.ppo.horizon,
            batch_size=task.ppo.minibatch,
            n_epochs=task.ppo.epochs,
            gamma=task.ppo.discount,
            gae_lambda=task.ppo.trace,
            clip_range=task.ppo.clip,
            vf_coef=task.ppo.value_weight,
            max_grad_norm=task.ppo.max_norm,
            stats_window_size=task.scored,
            policy_kwargs={"features_extractor_class": Hidden, "net_arch": []},
            seed=task.seed * task.environments,
            device="cpu",
        )
        self.ppo.set_logger(NoLogger(folder=None, output_formats=[]))  # or each improvement makes a folder
        first = task.policy().state_dict()
        # Not strict, because it has the hidden layers under three names.
        self.ppo.policy.load_state_dict({NAMES[name]: p for name, p in first.items()}, strict=False)
        self._best, self._best_policy = -math.inf, self._copied()

    @property
    def columns(self) -> Sequence[str]:
        return ("step", "steps", "score", "best")

    @property
    def epochs(self) -> float:
        return self.ppo.num_timesteps // self._at_once

    @property
    def _at_once(self) -> int:
        return self._task.environments * self._task.ppo.horizon

    def advance(self, logger: Logger) -> list[Row]:
        if self._diverged or self.epochs == self._task.epochs:
            return []
        began, before = time.process_time(), self._copied()
        try:
            self.ppo.learn(self._at_once, reset_num_timesteps=False, log_interval=None)  # pyright: ignore
        except ValueError as error:
            if _NOT_FINITE not in str(error):
                raise
            self._diverged = True
            return []
        self._seconds += time.process_time() - began
        row = {"step": self.epochs - 1, "steps": self.ppo.num_timesteps}
        returns = [episode["r"] for episode in self.ppo.ep_info_buffer or ()]
        if len(returns) < self._task.scored:
            return [row]
        score = float(np.mean(returns))
        if score > self._best:
            self._best, self._best_policy = score, before
        return [row | {"score": score, "best": self._best}]

    def _copied(self) -> dict[str, Any]:
        """Return the policy and its scales as those of ours are kept."""
        found = self.ppo.policy.state_dict()
        policy = {ours: found[theirs].clone() for ours, theirs in NAMES.items()}
        scales: Any = self._environments
        kept = [
            [torch.tensor(x, dtype=torch.float64) for x in (m.mean, m.var, m.count)]
            for m in (scales.obs_rms, scales.ret_rms)
        ]
        return {"policy": policy, "scales": {"moments": kept, "sums": torch.zeros(1)}}

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do again what was done: it depends on the seed alone."""
        while self.epochs < state["epochs"]:
            self.advance(None)  # pyright: ignore

    def finish(self, folder: Path) -> dict[str, Any]:
        save(folder / "best.pt", self._best_policy)
        returns = [episode["r"] for episode in self.ppo.ep_info_buffer or ()]
        return {
            "diverged": self._diverged,
            "steps": self.ppo.num_timesteps,
            "best": self._best if math.isfinite(self._best) else None,
            "final": float(np.mean(returns)) if returns else None,
            "walked": mean_return(self._task, self._best_policy),
            "steps_per_second": round(self.ppo.num_timesteps / (self._seconds or math.inf), 1),
        }
