"""PPO-Clip (Schulman et al., 2017): the policy, what its actions were worth, and the loss that improves it.

L = -E[min(r A, clip(r, 1 - ε, 1 + ε) A)] + c E[(V - R)²],    r = π(a|s) / π_old(a|s),    R = A + V_old
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from metafop import Online, OnlineCarry, Seen, tree
from metafop.optim import FOP
from metafop.types import Meta, Params, Trains


@dataclass(frozen=True)
class Settings:
    """What the paper leaves open is as in OpenAI's Baselines for continuous control, on which it builds.

    Not so: several environments, a constant learning rate, no clipping of the value's loss, and what would
    have come after time is out counts.
    """

    horizon: int = 256  # steps that each environment takes between two improvements of the policy
    epochs: int = 10  # times that each of these steps is learned from
    minibatch: int = 32
    discount: float = 0.99
    trace: float = 0.95  # λ of the advantages
    clip: float = 0.2  # ε
    value_weight: float = 0.5  # c
    max_norm: float = 0.5  # of the gradient; a larger one is scaled down


class Outlook(NamedTuple):
    """What a policy makes of observations: a normal distribution of actions, and what is still to come."""

    mean: Tensor
    log_std: Tensor
    value: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        off = (actions - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * off.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def draw(self, generator: Generator) -> Tensor:
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

    def forward(self, observations: Tensor) -> Outlook:
        seen = self.hidden(observations)
        return Outlook(torch.tanh(self.mean(seen)), self.log_std, self.value(seen).squeeze(-1))


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


Act = Callable[[Tensor], Outlook]
Inspected = tuple[Trains, Meta, Params]  # with the last gradients


@torch.no_grad()
def to_learn_from(act: Act, rollout: Rollout, settings: Settings) -> Batch:
    """Return the steps of a rollout with what the policy that took them expects, and what it got."""
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
    surprises = rollout.rewards + settings.discount * after * ~rollout.terminated - before
    fading = settings.discount * settings.trace * ~rollout.ended
    found, later = [], torch.zeros_like(before[0])
    for surprise, fade in zip(surprises.flip(0), fading.flip(0), strict=True):
        later = surprise + fade * later
        found.append(later)
    return torch.stack(found[::-1])


def loss(act: Act, batch: Batch, settings: Settings) -> Tensor:
    """Return L of a minibatch, whose advantages are standardised."""
    outlook = act(batch.observations)
    ratios = torch.exp(outlook.log_prob(batch.actions) - batch.log_probs)
    gained = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
    held = ratios.clamp(1 - settings.clip, 1 + settings.clip)
    improved = torch.minimum(ratios * gained, held * gained).mean()
    return settings.value_weight * (outlook.value - batch.returns).square().mean() - improved


def minibatches(batch: Batch, settings: Settings, generator: Generator) -> Iterator[Batch]:
    """Yield every step once an epoch, in an order of its own; those that fill no minibatch are left out."""
    count = len(batch.advantages)
    for _ in range(settings.epochs):
        order = torch.randperm(count, generator=generator)[: count - count % settings.minibatch]
        for parts in zip(*(x[order].split(settings.minibatch) for x in batch), strict=True):
            yield Batch(*parts)


class Learner(Protocol):
    """What improves a policy, minibatch by minibatch."""

    @property
    def params(self) -> Params: ...

    def act(self, observations: Tensor) -> Outlook: ...

    def learn(self, batch: Batch) -> Tensor:
        """Take a step, and return the loss before it."""
        ...

    def inspect(self) -> Inspected | None:
        """Return what is learned of how to learn, if anything is, as `Logger.diagnostics` takes it."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Ordinary:
    """A policy improved by an optimizer of torch's form, such as `metafop.optim.FOP`."""

    def __init__(self, policy: Policy, optimizer: Optimizer, settings: Settings) -> None:
        self._policy, self._optimizer, self._settings = policy, optimizer, settings

    @property
    def params(self) -> Params:
        return {name: p.detach() for name, p in self._policy.named_parameters()}

    def act(self, observations: Tensor) -> Outlook:
        return self._policy(observations)

    def learn(self, batch: Batch) -> Tensor:
        self._optimizer.zero_grad()
        value = loss(self._policy, batch, self._settings)
        value.backward()
        clip_grad_norm_(self._policy.parameters(), self._settings.max_norm)
        self._optimizer.step()
        return value.detach()

    def inspect(self) -> Inspected | None:
        return self._optimizer.inspect() if isinstance(self._optimizer, FOP) else None

    def state_dict(self) -> dict[str, Any]:
        return {"policy": self._policy.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])


class Functional:
    """A policy improved by a pure step: evaluate, clip the gradient, advance.

    `steers` are taken in turn. Where FOP learns from every tenth step, the other nine have a meta learning
    rate of zero, and leave the meta-optimizer as it was.
    """

    def __init__(self, policy: Policy, trains: Trains, carry: Any, settings: Settings, *steers: Meta) -> None:
        self._policy, self._trains, self._carry, self._settings = policy, trains, carry, settings
        self._steers, self._step = steers, 0

    @property
    def params(self) -> Params:
        return self._carry.params

    def act(self, observations: Tensor) -> Outlook:
        return functional_call(self._policy, self.params, (observations,))

    def learn(self, batch: Batch) -> Tensor:
        seen = self._trains.evaluate(self._carry, batch)
        shrink = (self._settings.max_norm / (get_total_norm(seen.grads.values()) + 1e-6)).clamp(max=1.0)
        clipped = {name: grad * shrink for name, grad in seen.grads.items()}
        turn = self._step % len(self._steers)
        new, _ = self._trains.advance(
            self._steers[turn], self._carry, Seen(seen.value, clipped, seen.buffers)
        )
        self._carry = OnlineCarry(**new._asdict() | {"meta_opt": self._carry.meta_opt}) if turn else new
        self._step += 1
        return seen.value

    def inspect(self) -> Inspected | None:
        if not isinstance(self._trains, Online):
            return None
        return self._trains.training, self._carry.meta, self._carry.last_seen.grads

    def state_dict(self) -> dict[str, Any]:
        return {"carry": tree.named(self._carry), "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._carry, self._step = tree.replace(self._carry, state["carry"]), state["step"]
