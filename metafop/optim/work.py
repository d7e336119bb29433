"""What a step of FOP works on: parameters that have a gradient, and what is known about their step."""

from typing import Any

import torch
from torch import Tensor

from metafop.optim import bases
from metafop.optim.moves import Leaf
from metafop.optim.plans import PREFIX, Plan
from metafop.optimizers import Adam, Momentum
from metafop.types import Params, Tree

_NOT_YET: dict[str, Any] = {}


class Item:
    """A parameter: what lasts from step to step, and what belongs to the step at hand."""

    def __init__(self, key: str, param: Tensor, plan: Plan, states: dict[Tensor, dict[str, Any]]) -> None:
        self.key, self.param, self.plan, self._states = key, param, plan, states
        self.state: dict[str, Any] = _NOT_YET  # the optimizer's entry for the parameter
        self.m: Tree = (
            None  # its family's tensors, which are entries of the state: the first of them is `made_of`
        )
        self.made_of: Tensor | None = None
        self.leaves: list[Leaf] = []  # those that are learned
        self.factor: Any = None  # what P is made of, until m moves
        self.grad: Tensor = param
        self.turned: Tensor | None = None  # P g, where there is a P
        self.before: Tensor | None = None  # the parameter before the step, if the next may learn from it
        self.entries: dict[str, Any] = {}  # what is to be written into the state

    def take(self, grad: Tensor | None) -> bool:
        """Take up the step at hand, and return whether there is a gradient for it."""
        if grad is None:
            return False
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"FOP takes dense gradients, got a {grad.layout} one for {self.plan.name!r}. "
                "Make the layer's gradients dense, for example by nn.Embedding(sparse=False)."
            )
        state = self._states.get(self.param, _NOT_YET)
        if state is not self.state or state.get(f"{PREFIX}m0") is not self.made_of:  # the user changed it
            self.state, self.m, self.factor, self.made_of = state, None, None, None
        self.grad, self.turned, self.before, self.entries = grad, None, None, {}
        return True

    def own(self, name: str) -> Any:
        """Return an entry of FOP's, or None."""
        name = PREFIX + name
        return self.entries[name] if name in self.entries else self.state.get(name)

    def keep(self, name: str, value: Any) -> None:
        self.entries[PREFIX + name] = value

    def write(self) -> None:
        if self.entries:
            self.state = self._states[self.param]
            self.state.update(self.entries)
            self.made_of = self.state.get(f"{PREFIX}m0")


class Work:
    """The parameters of a group that have a gradient, and what is known about their step."""

    def __init__(self, base: type, group: dict[str, Any], items: list[Item]) -> None:
        self.group, self.items = group, items
        self.steered: dict[str, Any] = {}  # settings that are learned, as the step uses them
        self.pending: dict[str, Any] = {}  # what is to be written into the group
        self.undo: list[tuple[list[Tensor], list[Tensor]]] = []
        self.known = bases.described(base, group)
        self.turning = [item for item in items if item.plan.shapes] if "precond" in group["learn"] else []
        # Whether P is credited with more than the last gradient.
        self.velocity = group["credit"] == "velocity" and isinstance(self.known, Momentum | Adam)

    @property
    def lr(self) -> float | Tensor:
        return self.steered.get("lr", self.group["lr"])

    @property
    def moves(self) -> bool:
        """Whether the parameters will move at all: a step of lr zero teaches nothing."""
        return not bases.is_zero(self.group["lr"])

    def hyper(self, lr: Any, dtype: torch.dtype) -> Any:
        """Return the settings of the step as hyperparameters of the pure optimizer."""
        settings = {**self.group, **self.steered} if self.steered else self.group
        return bases.hyper(self.known, settings, lr, dtype)

    def signed(self, items: list[Item]) -> Params:
        """Return the gradients of what is minimized."""
        return {item.key: wide(bases.signed(self.group, item.grad)) for item in items}

    def write(self) -> None:
        self.group.update(self.pending)
        for item in self.items:
            item.write()


def wide(x: Tensor) -> Tensor:
    """Return a tensor of half precision in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
