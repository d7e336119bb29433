"""What improves a policy: an optimizer of torch's form, or the library's pure step, with the same numbers."""

from typing import Any, Protocol

from torch import Tensor
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import SGD, Adam, Optimizer

import metafop
from experiments.paper.bipedal.ppo import Batch, Policy, PolicyOutput, Settings, loss
from experiments.paper.bipedal.settings import META_RATES, RunSettings
from metafop import Dense, Momentum, Online, OnlineCarry, Seen, Training, assign, tree
from metafop.functional import from_module
from metafop.optim import FOP
from metafop.protocols import Trains
from metafop.types import Meta, Params

AS_PRINTED: dict[str, Any] = {"order": "paper", "credit": "gradient", "guards": ()}  # to `Online`
FULL = {"*.weight": Dense()}  # FOP at full rank on every layer, of actions and values alike
Inspected = tuple[Trains, Meta, Params]  # with the last gradients


class Learner(Protocol):
    """What improves a policy, minibatch by minibatch."""

    @property
    def params(self) -> Params: ...

    def act(self, observations: Tensor) -> PolicyOutput: ...

    def learn(self, batch: Batch) -> Tensor:
        """Take a step, and return the loss before it."""
        ...

    def inspect(self) -> Inspected | None:
        """Return what `Logger.diagnostics` takes; None if nothing is learned about learning."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TorchLearner:
    """A policy improved by an optimizer of torch's form, such as `metafop.optim.FOP`."""

    def __init__(self, policy: Policy, optimizer: Optimizer, settings: Settings) -> None:
        self._policy, self._optimizer, self._settings = policy, optimizer, settings

    @property
    def params(self) -> Params:
        return {name: p.detach() for name, p in self._policy.named_parameters()}

    def act(self, observations: Tensor) -> PolicyOutput:
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


class FunctionalLearner:
    """A policy improved by a pure step: evaluate, clip the gradient, advance.

    `outer_metas` are used one after the other, again and again. Where FOP learns from every tenth step, nine
    of ten have a meta learning rate of zero, and leave the meta-optimizer as it was.
    """

    def __init__(
        self, policy: Policy, trains: Trains, carry: Any, settings: Settings, *outer_metas: Meta
    ) -> None:
        self._policy, self._trains, self._carry, self._settings = policy, trains, carry, settings
        self._outer_metas, self._step = outer_metas, 0

    @property
    def params(self) -> Params:
        return self._carry.params

    def act(self, observations: Tensor) -> PolicyOutput:
        return functional_call(self._policy, self.params, (observations,))

    def learn(self, batch: Batch) -> Tensor:
        skip = self._step % len(self._outer_metas)
        outer_meta = self._outer_metas[skip]
        seen = self._trains.evaluate(outer_meta, self._carry, batch)
        shrink = (self._settings.max_norm / (get_total_norm(seen.grads.values()) + 1e-6)).clamp(max=1.0)
        clipped = {name: grad * shrink for name, grad in seen.grads.items()}
        new, _ = self._trains.advance(outer_meta, self._carry, Seen(seen.value, clipped, seen.buffers))
        self._carry = OnlineCarry(**new._asdict() | {"meta_opt": self._carry.meta_opt}) if skip else new
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


def make_learner(task: RunSettings) -> Learner:
    return torch_learner(task) if task.through == "optim" else functional_learner(task)


def torch_learner(task: RunSettings) -> TorchLearner:
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
    return TorchLearner(policy, optimizer, task.ppo)


def functional_learner(task: RunSettings) -> FunctionalLearner:
    """Return the same learner, of pure functions."""
    policy = task.policy()
    objective, params, buffers = from_module(policy, lambda act, batch: loss(act, batch, task.ppo))
    if task.method == "adam":
        training, hyper = Training(objective, metafop.Adam()), metafop.Adam().hyper(lr=task.lr, eps=1e-5)
    else:
        families = assign(params, FULL) if task.method != "momentum" else {}
        training, hyper = (
            Training(objective, Momentum(), families),
            Momentum().hyper(lr=task.lr, momentum=0.9),
        )
    meta, carry = training.init_meta(params, **hyper._asdict()), training.init(params, buffers)
    if task.method in ("adam", "momentum"):
        return FunctionalLearner(policy, training, carry, task.ppo, meta)
    online = Online(training, metafop.Adam(), **AS_PRINTED if task.as_printed else {})
    skipped = 0 if task.as_printed else 9  # FOP's default learns from every tenth step
    lrs = [META_RATES[task.method], *[0.0] * skipped]
    outer_metas = [online.init_meta(meta, lr=lr) for lr in lrs]
    return FunctionalLearner(policy, online, online.init(meta, carry), task.ppo, *outer_metas)
