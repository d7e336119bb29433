"""Running normalization of observations and scaling of rewards."""

from typing import Any

import numpy as np
import torch
from gymnasium.wrappers.utils import RunningMeanStd
from numpy.typing import NDArray
from torch import Tensor

CLIP = 10.0  # the largest observation or reward, in deviations


class RunningNormalizer:
    """The running mean and deviation of observations; the running deviation of discounted sums of rewards.

    Rewards are divided by it, as in OpenAI's Baselines. Their mean is kept: the policy learns from it.
    """

    def __init__(self, environments: int, discount: float) -> None:
        self._seen, self._summed = RunningMeanStd(shape=(24,)), RunningMeanStd(shape=())
        self._sums, self._discount = np.zeros(environments), discount

    def observe(self, observations: NDArray[Any]) -> Tensor:
        """Update the mean and deviation, and return the normalized observations."""
        self._seen.update(observations)
        return self.normalize(observations)

    def normalize(self, observations: NDArray[Any]) -> Tensor:
        return _clipped((observations - self._seen.mean) / np.sqrt(self._seen.var + 1e-8))

    def scale_reward(self, rewards: NDArray[Any], ended: NDArray[Any]) -> Tensor:
        self._sums = self._discount * self._sums + rewards
        self._summed.update(self._sums)
        self._sums[ended] = 0.0
        return _clipped(rewards / np.sqrt(self._summed.var + 1e-8))

    def state_dict(self) -> dict[str, Any]:
        moments = [[np.asarray(x, np.float64) for x in (m.mean, m.var, m.count)] for m in self._moments]
        saved = [[torch.from_numpy(x.copy()) for x in values] for values in moments]
        return {"moments": saved, "sums": torch.from_numpy(self._sums.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for moments, saved in zip(self._moments, state["moments"], strict=True):
            moments.mean, moments.var, count = (x.numpy().copy() for x in saved)
            moments.count = float(count)
        self._sums = state["sums"].numpy().copy()

    @property
    def _moments(self) -> tuple[RunningMeanStd, RunningMeanStd]:
        return self._seen, self._summed


def _clipped(scaled: NDArray[Any]) -> Tensor:
    return torch.as_tensor(scaled.clip(-CLIP, CLIP), dtype=torch.get_default_dtype())
