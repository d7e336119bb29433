"""What a step of FOP works on: parameters that have a gradient, and what is known about their step."""

from typing import Any

import torch
from torch import Tensor

from metafop.optim import bases
from metafop.optim.moves import Leaf
from metafop.optim.plans import PREFIX, Plan
from metafop.optimizers import Adam, Momentum
from metafop.preconditioners import stacks
from metafop.types import Params, Tree

_NOT_YET: dict[str, Any] = {}
_FIRST = f"{PREFIX}m0"


class Item:
    """A parameter: what lasts from step to step, and what belongs to the step at hand."""

    def __init__(self, key: str, param: Tensor, plan: Plan, states: dict[Tensor, dict[str, Any]]) -> None:
        self.key, self.param, self.plan, self._states = key, param, plan, states
        self.turn = stacks.turner(plan.family)
        self.state: dict[str, Any] = _NOT_YET  # the optimizer's entry for the parameter
        self.m: Tree = None  # its family's tensors, which are entries of the state
        self.made_of: Tensor | None = None  # the first of them
        self.leaves: list[Leaf] = []  # those that are learned
        self.factor: Any = None  # what P is made of, until m moves
        self.needs: tuple[str, ...] = ()  # the entries that are known to be there
        self.clear()

    def clear(self) -> None:
        """Let go of the step at hand."""
        self.grad: Tensor = self.param
        self.turned: Tensor | None = None  # P g, where there is a P
        self.before: Tensor | None = None  # the parameter before the step, if the next may learn from it
        self.entries: dict[str, Any] = {}  # what is to be written into the state

    def take(self, grad: Tensor | None) -> bool:
        """Take up the step at hand, and return whether there is a gradient for it."""
        if grad is None:
            return False
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"FOP takes dense gradients, got a {grad.layout} one for {self.plan.name!r}. "
                "Make the layer's gradients dense, for example by nn.Embedding(sparse=False)."
            )
        self.grad = grad
        if self.plan.shapes:
            self.find()
        return True

    def find(self) -> None:
        """Look up the state, and forget what was made of another: the user may change it."""
        state = self._states.get(self.param, _NOT_YET)
        if state is not self.state or state.get(_FIRST) is not self.made_of:
            self.state, self.m, self.factor, self.made_of, self.needs = state, None, None, None, ()

    def own(self, name: str) -> Any:
        """Return an entry of FOP's, or None."""
        name = PREFIX + name
        return self.entries[name] if name in self.entries else self.state.get(name)

    def keep(self, name: str, value: Any) -> None:
        self.entries[PREFIX + name] = value

    def write(self) -> None:
        self.state = self._states[self.param]
        self.state.update(self.entries)
        self.made_of = self.state.get(_FIRST)


class Work:
    """The parameters of a group that have a gradient, and what is known about their step."""

    def __init__(self, base: type, group: dict[str, Any], items: list[Item]) -> None:
        self.group, self.items = group, items
        self.learned = [name for name in group["learn"] if name != "precond"]  # settings, that is
        self.steered: dict[str, Any] = {}  # what they are in this step
        self.pending: dict[str, Any] = {}  # what is to be written into the group
        self.undo: list[tuple[list[Tensor], list[Tensor]]] = []
        self.known = bases.described(base, group)
        self.turning = [item for item in items if item.plan.shapes] if "precond" in group["learn"] else []
        # Whether P is credited with more than the last gradient, and with a tensor that only credit needs.
        self.velocity = group["credit"] == "velocity" and isinstance(self.known, Momentum | Adam)
        self.apart = not self.velocity or not isinstance(self.known, Momentum) or self.known.nesterov
        self.through_moments = isinstance(self.known, Adam) and not self.velocity

    @property
    def needs(self) -> tuple[str, ...]:
        """The entries, as large as the parameter, that steps of this kind need."""
        if not self.apart:
            return ("memory",)
        more = ("memory",) if self.velocity else ("direction",) if self.through_moments else ()
        return ("credit", *more)

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
        """Write everything down, once the base has taken its step."""
        self.group.update(self.pending)
        for item in self.items:
            if item.entries:
                item.write()

    def clear(self) -> None:
        for item in self.items:
            item.clear()


def wide(x: Tensor) -> Tensor:
    """Return a tensor of half precision in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
