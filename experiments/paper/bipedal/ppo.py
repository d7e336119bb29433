"""PPO-Clip (Schulman et al., 2017): the policy, the advantages of its actions, and the loss.

L = -E[min(r A, clip(r, 1 - ε, 1 + ε) A)] + c E[(V - R)²],    r = π(a|s) / π_old(a|s),    R = A + V_old
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from experiments.runner.settings import FromZero


@dataclass(frozen=True)
class Settings:
    """What the paper leaves open is as in OpenAI's Baselines for continuous control, on which it builds.

    Different here: several environments, a constant learning rate, no clipping of the value's loss, and an
    episode that is truncated by the time limit is bootstrapped with the value of its last observation.
    """

    horizon: int = 256  # steps that each environment takes between two improvements of the policy
    epochs: int = 10  # times that each of these steps is learned from
    minibatch: int = 32
    discount: FromZero[float] = 0.99
    trace: FromZero[float] = 0.95  # λ of the advantages
    clip: float = 0.2  # ε
    value_weight: FromZero[float] = 0.5  # c
    max_norm: float = 0.5  # of the gradient; a larger one is scaled down


class PolicyOutput(NamedTuple):
    """A normal distribution of actions, and the value: the discounted rewards that are expected."""

    mean: Tensor
    log_std: Tensor
    value: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        off = (actions - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * off.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def sample(self, generator: Generator) -> Tensor:
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        return self.mean + torch.exp(self.log_std) * noise


class Policy(nn.Module):
    """Two hidden layers of tanh, from which the actions, a third layer of tanh, and the value are read."""

    def __init__(self, observations: int, actions: int, hidden: int = 40) -> None:
        super().__init__()
        self.hidden = nn.Sequential(
            nn.Linear(observations, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
        )
        self.mean, self.value = nn.Linear(hidden, actions), nn.Linear(hidden, 1)
        self.log_std = nn.Parameter(torch.zeros(actions))
        gains = {"hidden.0": 2**0.5, "hidden.2": 2**0.5, "mean": 0.01, "value": 1.0}
        for name, gain in gains.items():
            nn.init.orthogonal_(self.get_parameter(f"{name}.weight"), gain)
            nn.init.zeros_(self.get_parameter(f"{name}.bias"))

    def forward(self, observations: Tensor) -> PolicyOutput:
        seen = self.hidden(observations)
        return PolicyOutput(torch.tanh(self.mean(seen)), self.log_std, self.value(seen).squeeze(-1))


class Rollout(NamedTuple):
    """What was done and seen, (steps, environments, …). `after` is seen before a new episode begins."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    after: Tensor
    terminated: Tensor
    ended: Tensor  # terminated, or out of time


class Batch(NamedTuple):
    """Steps to learn from, in whatever order."""

    observations: Tensor
    actions: Tensor
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor


Act = Callable[[Tensor], PolicyOutput]


@torch.no_grad()
def training_batch(act: Act, rollout: Rollout, settings: Settings) -> Batch:
    """Return the steps of a rollout with their advantages and returns, by the policy that took them."""
    before, after = act(rollout.observations), act(rollout.after)
    gained = advantages(rollout, before.value, after.value, settings)
    log_probs = before.log_prob(rollout.actions)
    found = Batch(rollout.observations, rollout.actions, log_probs, gained, gained + before.value)
    return Batch(*(x.flatten(0, 1) for x in found))


def advantages(rollout: Rollout, before: Tensor, after: Tensor, settings: Settings) -> Tensor:
    """Return A by generalised advantage estimation (Schulman et al., 2016), backwards in time.

    δ = r + γ V(s') - V(s),    A = δ + γ λ A',    V(s') = 0 where the biped has fallen or arrived, A' = 0
    where an episode ends: one that is out of time is still worth what would have come.
    """
    td_errors = rollout.rewards + settings.discount * after * ~rollout.terminated - before
    fading = settings.discount * settings.trace * ~rollout.ended
    found, later = [], torch.zeros_like(before[0])
    for td_error, fade in zip(td_errors.flip(0), fading.flip(0), strict=True):
        later = td_error + fade * later
        found.append(later)
    return torch.stack(found[::-1])


def loss(act: Act, batch: Batch, settings: Settings) -> Tensor:
    """Return L of a minibatch, whose advantages are standardised."""
    output = act(batch.observations)
    ratios = torch.exp(output.log_prob(batch.actions) - batch.log_probs)
    gained = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
    held = ratios.clamp(1 - settings.clip, 1 + settings.clip)
    improved = torch.minimum(ratios * gained, held * gained).mean()
    return settings.value_weight * (output.value - batch.returns).square().mean() - improved


def minibatches(batch: Batch, settings: Settings, generator: Generator) -> Iterator[Batch]:
    """Yield every step once an epoch, in an order of its own; those that fill no minibatch are left out."""
    count = len(batch.advantages)
    for _ in range(settings.epochs):
        order = torch.randperm(count, generator=generator)[: count - count % settings.minibatch]
        for parts in zip(*(x[order].split(settings.minibatch) for x in batch), strict=True):
            yield Batch(*parts)
