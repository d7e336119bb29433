"""One biped that learns to walk: the settings of a run, and what improves its policy."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import SGD, Adam

import metafop
from experiments.ppo import Functional, Learner, Ordinary, Policy, Settings, loss
from experiments.runs import Process
from metafop import Dense, Momentum, Online, Training, assign
from metafop.functional import from_module
from metafop.optim import FOP

Terrain = Literal["standard", "rough"]
Name = Literal[
    "momentum",
    "adam",
    "fop-paper",
    "fop-paper-1e-5",
    "fop",
    "fop-5e-4",
    "adam-sb3",  # that of Stable-Baselines3
]
Through = Literal["optim", "functional"]
RATES: dict[Name, float] = {
    "momentum": 3.5e-4,
    "adam": 3e-4,
    "fop-paper": 3e-4,
    "fop-paper-1e-5": 3e-4,
    "fop": 3e-4,
    "fop-5e-4": 3e-4,
    "adam-sb3": 3e-4,
}
# The paper does not print its meta learning rate for this task: here FOP's own, and a tenth of it.
META_RATES: dict[Name, float] = {"fop-paper": 1e-4, "fop-paper-1e-5": 1e-5, "fop": 5e-3, "fop-5e-4": 5e-4}
AS_PRINTED: dict[str, Any] = {"order": "paper", "credit": "gradient", "guards": ()}  # to `Online`
FULL = {"*.weight": Dense()}  # FOP at full rank on every layer, of actions and values alike


@dataclass(frozen=True)
class Walk:
    """The settings of a run."""

    method: Name
    lr: float
    seed: int  # of the first weights, the actions, and the starts
    terrain: Terrain
    landscape: int  # the seed of the terrain
    steps: int  # of all environments together, rounded down to whole improvements of the policy
    environments: int
    ppo: Settings
    through: Through
    scored: int = 20  # the last episodes, whose mean return is a score

    def __post_init__(self) -> None:
        at_once = self.environments * self.ppo.horizon
        if self.steps < at_once:
            raise ValueError(
                f"The policy is improved after {at_once} steps, got steps={self.steps}. Pass more."
            )
        if not 2 <= self.ppo.minibatch <= at_once:
            raise ValueError(
                f"A minibatch has 2 to {at_once} steps, as many as are walked between two improvements, got "
                f"{self.ppo.minibatch}. Pass such a number."
            )

    @property
    def name(self) -> str:
        return f"{self.terrain}-{self.method}-seed{self.seed}"

    @property
    def epochs(self) -> int:
        """How often the policy is improved."""
        return self.steps // (self.environments * self.ppo.horizon)

    @property
    def as_printed(self) -> bool:
        """Whether M is learned by the rule that the paper prints."""
        return self.method.startswith("fop-paper")

    def start(self) -> Process:
        # What needs the extra `rl`, or `peers`.
        if self.method == "adam-sb3":
            from experiments.walking_peer import PeerWalking

            return PeerWalking(self)
        from experiments.walking import Walking

        return Walking(self)

    def policy(self) -> Policy:
        """Return the policy with the first weights of this seed."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)  # nn.Module draws its first weights from the global generator
            return Policy(observations=24, actions=4)

    def learner(self) -> Learner:
        return ordinary(self) if self.through == "optim" else functional(self)


def ordinary(task: Walk) -> Ordinary:
    """Return the learner as a training script would write it."""
    policy = task.policy()
    if task.method == "adam":
        optimizer = Adam(policy.parameters(), lr=task.lr, eps=1e-5)
    elif task.method == "momentum":
        optimizer = SGD(policy.parameters(), lr=task.lr, momentum=0.9)
    else:
        preset, meta_lr = "paper" if task.as_printed else "default", META_RATES[task.method]
        optimizer = FOP(
            policy, SGD, preset=preset, meta_lr=meta_lr, preconditioner=FULL, lr=task.lr, momentum=0.9
        )
    return Ordinary(policy, optimizer, task.ppo)


def functional(task: Walk) -> Functional:
    """Return the same learner, of pure functions."""
    policy = task.policy()
    objective, params, buffers = from_module(policy, lambda act, batch: loss(act, batch, task.ppo))
    if task.method == "adam":
        training, hyper = Training(objective, metafop.Adam()), metafop.Adam().hyper(lr=task.lr, eps=1e-5)
    else:
        families = assign(params, FULL) if task.method != "momentum" else {}
        training, hyper = Training(objective, Momentum(), families), Momentum().hyper(lr=task.lr, decay=0.9)
    meta, carry = training.meta(params, hyper), training.init(params, buffers)
    if task.method in ("adam", "momentum"):
        return Functional(policy, training, carry, task.ppo, meta)
    online = Online(training, metafop.Adam(), **AS_PRINTED if task.as_printed else {})
    rests = 0 if task.as_printed else 9  # FOP's default learns from every tenth step
    lrs = [META_RATES[task.method], *[0.0] * rests]
    steers = [online.meta(meta, metafop.Adam().hyper(lr=lr)) for lr in lrs]
    return Functional(policy, online, online.init(meta, carry), task.ppo, *steers)
