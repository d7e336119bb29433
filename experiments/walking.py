"""A biped on its way: it walks for a while, learns from that, and if stopped goes on to the same bits."""

import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator

from experiments import ppo
from experiments.runs import Row, save
from experiments.scales import Scales
from experiments.strolls import OTHERS, mean_return
from experiments.walk import Walk
from experiments.walker import Walkers
from metafop import tree
from metafop.tensorboard import Logger

LOOKED_AT_EVERY = 50  # improvements, for what FOP has learned
COLUMNS = ("step", "steps", "episodes", "return", "score", "best", "loss", "kl", "clipped", "std")


class Walking:
    """A run under way. One whose policy is no longer finite has diverged, and ends there."""

    def __init__(self, task: Walk) -> None:
        self._task, self.learner = task, task.learner()
        self._generator = Generator().manual_seed(task.seed + OTHERS)  # not that of the first weights
        self._scales = Scales(task.environments, task.ppo.discount)
        self._walkers = Walkers(task.environments, task.terrain, task.landscape)
        seeds: list[int | None] = [task.seed * task.environments + i for i in range(task.environments)]
        self._observations, _ = self._walkers.reset(seed=seeds)
        self._scales.observe(self._observations)
        self._returns, self._episodes = np.zeros(task.environments), 0
        self._last: deque[float] = deque(maxlen=task.scored)
        self._best, self._best_policy = -math.inf, self._copied()
        self._iteration, self._diverged, self._walking, self._learning = 0, False, 0.0, 0.0

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
        rollout, returns = self._walk()
        walked = time.process_time()
        row = {"step": self._iteration, "steps": (self._iteration + 1) * rollout.rewards.numel()}
        row |= self._judge(returns) | self._learn(rollout)
        self._walking += walked - began
        self._learning += time.process_time() - walked
        # The pure core does not step along a gradient that is not finite: the loss tells as well.
        finite = [math.isfinite(row["loss"]), math.isfinite(row["std"]), tree.all_finite(self.learner.params)]
        self._diverged = not all(finite)
        self._iteration += 1
        if self._iteration % LOOKED_AT_EVERY == 0:
            self._look(logger)
        return [row]

    @torch.no_grad()
    def _walk(self) -> tuple[ppo.Rollout, list[float]]:
        """Return what all walkers did, and the returns of the episodes that ended."""
        rows, returns = list[ppo.Rollout](), list[float]()
        observations = self._scales.standard(self._observations)
        for _ in range(self._task.ppo.horizon):
            actions = self.learner.act(observations).draw(self._generator)
            self._observations, rewards, terminated, truncated, info = self._walkers.step(actions.numpy())
            ended = terminated | truncated
            after = self._observations.copy()
            if ended.any():
                after[ended] = np.stack(info["final_obs"][ended])
            self._returns += rewards
            returns += self._returns[ended].tolist()
            self._returns[ended] = 0.0
            following, scaled = self._scales.observe(self._observations), self._scales.reward(rewards, ended)
            ends = map(torch.as_tensor, (terminated, ended))
            rows.append(ppo.Rollout(observations, actions, scaled, self._scales.standard(after), *ends))
            observations = following
        return ppo.Rollout(*map(torch.stack, zip(*rows, strict=True))), returns

    def _judge(self, returns: list[float]) -> dict[str, float]:
        """Return how well the policy walks, and keep it if none was better."""
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
        batch = ppo.to_learn_from(self.learner.act, rollout, self._task.ppo)
        parts = ppo.minibatches(batch, self._task.ppo, self._generator)
        losses = torch.stack([self.learner.learn(part) for part in parts])
        with torch.no_grad():
            outlook = self.learner.act(batch.observations)
            change = outlook.log_prob(batch.actions) - batch.log_probs
        ratios = change.exp()
        return {
            "loss": losses.mean().item(),
            "kl": (ratios - 1 - change).mean().item(),  # of the old policy from the new one: Schulman's k3
            "clipped": ((ratios - 1).abs() > self._task.ppo.clip).double().mean().item(),
            "std": outlook.log_std.exp().mean().item(),
        }

    def _look(self, logger: Logger) -> None:
        found = None if self._diverged else self.learner.inspect()
        if found is not None:
            logger.diagnostics(self._iteration - 1, *found)

    def _copied(self) -> dict[str, Any]:
        return {"policy": tree.copy(self.learner.params), "scales": self._scales.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(),
            "generator": self._generator.get_state(),
            "scales": self._scales.state_dict(),
            "walkers": [one.state_dict() for one in self._walkers.each],
            "observations": torch.tensor(self._observations),
            "returns": torch.tensor(self._returns),
            "last": list(self._last),
            "best": (self._best, self._best_policy),
            "counts": (self._iteration, self._episodes, self._diverged),
            "seconds": (self._walking, self._learning),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["learner"])
        self._scales.load_state_dict(state["scales"])
        self._generator.set_state(state["generator"])
        for one, saved in zip(self._walkers.each, state["walkers"], strict=True):
            one.load_state_dict(saved)
        self._observations, self._returns = state["observations"].numpy(), state["returns"].numpy().copy()
        self._last = deque(state["last"], maxlen=self._task.scored)
        self._best, self._best_policy = state["best"]
        self._iteration, self._episodes, self._diverged = state["counts"]
        self._walking, self._learning = state["seconds"]

    def finish(self, folder: Path) -> dict[str, Any]:
        """Return the figures; the best policy walks once more, from starts that it has not seen."""
        save(folder / "best.pt", self._best_policy)
        steps = self._iteration * self._task.environments * self._task.ppo.horizon
        return {
            "diverged": self._diverged,
            "steps": steps,
            "best": self._best if math.isfinite(self._best) else None,
            "final": float(np.mean(self._last)) if self._last else None,
            "walked": mean_return(self._task, self._best_policy),
            "walked_per_second": round(steps / self._walking, 1),
            "steps_per_second": round(steps / (self._walking + self._learning), 1),
        }
