"""A training run by our PPO: collect a rollout, improve the policy, repeat. It resumes to the same bits."""

import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator

from experiments.paper.bipedal import ppo
from experiments.paper.bipedal.environment import VectorEnvironment
from experiments.paper.bipedal.evaluation import UNSEEN, mean_return
from experiments.paper.bipedal.learners import make_learner
from experiments.paper.bipedal.normalization import RunningNormalizer
from experiments.paper.bipedal.settings import RunSettings
from experiments.runner.runs import Row, save
from metafop import tree
from metafop.tensorboard import Logger

DIAGNOSTICS_EVERY = 50  # improvements, for what FOP has learned
COLUMNS = ("step", "steps", "episodes", "return", "score", "best", "loss", "kl", "clipped", "std")


class TrainingRun:
    """A run in progress. It ends early, as diverged, if its policy is no longer finite."""

    def __init__(self, task: RunSettings) -> None:
        self._task, self.learner = task, make_learner(task)
        self._generator = Generator().manual_seed(task.seed + UNSEEN)  # not that of the first weights
        self._normalizer = RunningNormalizer(task.environments, task.ppo.discount)
        self._environments = VectorEnvironment(task.environments, task.terrain, task.landscape)
        seeds: list[int | None] = [task.seed * task.environments + i for i in range(task.environments)]
        self._observations, _ = self._environments.reset(seed=seeds)
        self._normalizer.observe(self._observations)
        self._returns, self._episodes = np.zeros(task.environments), 0
        self._last: deque[float] = deque(maxlen=task.scored)
        self._best, self._best_policy = -math.inf, self._copied()
        self._iteration, self._diverged, self._collecting, self._learning = 0, False, 0.0, 0.0

    @property
    def columns(self) -> Sequence[str]:
        return COLUMNS

    @property
    def epochs(self) -> float:
        return self._iteration

    def advance(self, logger: Logger) -> list[Row]:
        if self._diverged or self._iteration == self._task.epochs:
            return []
        began = time.process_time()
        rollout, returns = self._collect()
        collected = time.process_time()
        row = {"step": self._iteration, "steps": (self._iteration + 1) * rollout.rewards.numel()}
        row |= self._score(returns) | self._learn(rollout)
        self._collecting += collected - began
        self._learning += time.process_time() - collected
        # The pure step skips a gradient that is not finite, so the parameters alone do not show it.
        finite = [math.isfinite(row["loss"]), math.isfinite(row["std"]), tree.all_finite(self.learner.params)]
        self._diverged = not all(finite)
        self._iteration += 1
        if self._iteration % DIAGNOSTICS_EVERY == 0:
            self._log_diagnostics(logger)
        return [row]

    @torch.no_grad()
    def _collect(self) -> tuple[ppo.Rollout, list[float]]:
        """Return the steps of all environments, and the returns of the episodes that ended."""
        rows, returns = list[ppo.Rollout](), list[float]()
        observations = self._normalizer.normalize(self._observations)
        for _ in range(self._task.ppo.horizon):
            actions = self.learner.act(observations).sample(self._generator)
            step = self._environments.step(actions.numpy())
            self._observations, rewards, terminated, truncated, info = step
            ended = terminated | truncated
            after = self._observations.copy()
            if ended.any():
                after[ended] = np.stack(info["final_obs"][ended])
            self._returns += rewards
            returns += self._returns[ended].tolist()
            self._returns[ended] = 0.0
            following = self._normalizer.observe(self._observations)
            scaled = self._normalizer.scale_reward(rewards, ended)
            ends = map(torch.as_tensor, (terminated, ended))
            rows.append(ppo.Rollout(observations, actions, scaled, self._normalizer.normalize(after), *ends))
            observations = following
        return ppo.Rollout(*map(torch.stack, zip(*rows, strict=True))), returns

    def _score(self, returns: list[float]) -> dict[str, float]:
        """Return the score of the policy, and keep it if none was better."""
        self._last += returns
        self._episodes += len(returns)
        found = {"episodes": self._episodes} | ({"return": float(np.mean(returns))} if returns else {})
        if len(self._last) == self._task.scored:
            found["score"] = float(np.mean(self._last))
            if found["score"] > self._best:
                self._best, self._best_policy = found["score"], self._copied()
            found["best"] = self._best
        return found

    def _learn(self, rollout: ppo.Rollout) -> dict[str, float]:
        batch = ppo.training_batch(self.learner.act, rollout, self._task.ppo)
        parts = ppo.minibatches(batch, self._task.ppo, self._generator)
        losses = torch.stack([self.learner.learn(part) for part in parts])
        with torch.no_grad():
            output = self.learner.act(batch.observations)
            change = output.log_prob(batch.actions) - batch.log_probs
        ratios = change.exp()
        return {
            "loss": losses.mean().item(),
            "kl": (ratios - 1 - change).mean().item(),  # of the old policy from the new one: Schulman's k3
            "clipped": ((ratios - 1).abs() > self._task.ppo.clip).double().mean().item(),
            "std": output.log_std.exp().mean().item(),
        }

    def _log_diagnostics(self, logger: Logger) -> None:
        found = None if self._diverged else self.learner.inspect()
        if found is not None:
            logger.diagnostics(self._iteration - 1, *found)

    def _copied(self) -> dict[str, Any]:
        return {"policy": tree.copy(self.learner.params), "scales": self._normalizer.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(),
            "generator": self._generator.get_state(),
            "scales": self._normalizer.state_dict(),
            "walkers": [one.state_dict() for one in self._environments.each],
            "observations": torch.tensor(self._observations),
            "returns": torch.tensor(self._returns),
            "last": list(self._last),
            "best": (self._best, self._best_policy),
            "counts": (self._iteration, self._episodes, self._diverged),
            "seconds": (self._collecting, self._learning),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self._normalizer.load_state_dict(state["scales"])
        self._generator.set_state(state["generator"])
        for one, saved in zip(self._environments.each, state["walkers"], strict=True):
            one.load_state_dict(saved)
        self._observations, self._returns = state["observations"].numpy(), state["returns"].numpy().copy()
        self._last = deque(state["last"], maxlen=self._task.scored)
        self._best, self._best_policy = state["best"]
        self._iteration, self._episodes, self._diverged = state["counts"]
        self._collecting, self._learning = state["seconds"]

    def finish(self, folder: Path) -> dict[str, Any]:
        """Return the figures; the best policy is evaluated once more, from starts that it has not seen."""
        save(folder / "best.pt", self._best_policy)
        steps = self._iteration * self._task.environments * self._task.ppo.horizon
        return {
            "diverged": self._diverged,
            "steps": steps,
            "best": self._best if math.isfinite(self._best) else None,
            "final": float(np.mean(self._last)) if self._last else None,
            "walked": mean_return(self._task, self._best_policy),
            "walked_per_second": round(steps / self._collecting, 1),
            "steps_per_second": round(steps / (self._collecting + self._learning), 1),
        }
