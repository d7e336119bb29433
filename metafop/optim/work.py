"""What a step of FOP works on: parameters that have a gradient, and what is known about their step."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from metafop.optim import bases, choices, descent
from metafop.optim.descent import Descent
from metafop.optim.moves import Leaf, Undo
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
        self.is_sure = stacks.is_gram(plan.family)  # that P g is like g
        self.state: dict[str, Any] = _NOT_YET  # the optimizer's entry for the parameter
        self.m: Tree = None  # its family's tensors, which are entries of the state
        self.made_of: Tensor | None = None  # the first of them
        self.leaves: list[Leaf] = []  # those that are learned
        self.times: list[Tensor] = []  # the others, which pass
        self.turn: Callable[[Tensor], Tensor] | None = None  # makes P g of g, until m moves
        self.needs: tuple[str, ...] = ()  # the entries that are kept up to date
        self.next = 0  # the step of the group in which to learn next, or later if there is no gradient
        self.dtype = param.dtype  # of its gradients
        self.clear()

    def clear(self) -> None:
        """Let go of the step at hand."""
        self.grad: Tensor = self.param
        self.turned: Tensor | None = None  # P g, where there is a P
        self.recorded = False  # whether the next step may learn from this one
        self.stays = False  # whether it may, as it might have learned from an earlier one
        self.before: Tensor | None = None  # the parameter before the step, if that takes it
        self.entries: dict[str, Any] = {}  # what is to be written into the state

    def take(self, grad: Tensor, state: dict[str, Any]) -> bool:
        """Take up a gradient, and return whether the state is the one that m was made of: users change it."""
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"FOP takes dense gradients, got a {grad.layout} one for {self.plan.name!r}. "
                "Make the layer's gradients dense, for example by nn.Embedding(sparse=False)."
            )
        if grad.dtype is not self.dtype:
            self.dtype, self.turn = grad.dtype, None
        self.grad = grad
        return state is self.state and state.get(_FIRST) is self.made_of

    def find(self) -> None:
        """Look up the state, and forget what was made of another."""
        state = self._states.get(self.param, _NOT_YET)
        if state is not self.state or state.get(_FIRST) is not self.made_of:
            self.state, self.made_of = state, None
            self.m, self.turn, self.needs = None, None, ()

    def expire(self) -> None:
        """Drop what the steps before this one teach: the next ones are taken without P."""
        state = self._states.get(self.param, _NOT_YET)
        if state.get(f"{PREFIX}taken") is not None:
            state[f"{PREFIX}taken"] = 0
            for name in ("memory", "credit"):
                state.pop(f"{PREFIX}{name}", None)
        self.needs = ()

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
    """The parameters of a group: those that have a gradient, and what is known about their step."""

    def __init__(
        self, base: type, group: dict[str, Any], crew: list[Item], states: dict[Tensor, dict[str, Any]]
    ) -> None:
        self._base, self.group, self._crew, self._states = base, group, crew, states
        self._params = [item.param for item in crew]
        self._is_plain = all(map(descent.is_plain, self._params))
        self._kind: Any = None
        self._with_grad: list[Tensor] = []  # the parameters that have one
        self._seen: list[tuple[Item, int]] = []  # those whose gradients are looked at, and which of these
        self._descent: Descent | None = None  # the base's step, if it can be taken for the base
        self.ready = False  # whether all that turns has what it needs, and no step to learn from
        self._quiet_until = 0
        self.clear()

    def clear(self) -> None:
        """Let go of the step at hand."""
        self._grads: list[Tensor] = []
        self.descends = False  # whether the step is taken for the base
        self.steered: dict[str, Any] = {}  # settings that are learned, as they are in this step
        self.pending: dict[str, Any] = {}  # what is to be written into the group
        self.undo: Undo | None = []
        for item, _ in self._seen:
            item.clear()

    def is_for(self, group: dict[str, Any]) -> bool:
        """Return whether this is the work of that group, and of the parameters that it has."""
        params = group["params"]
        same = group is self.group and len(params) == len(self._params)
        return same and all(map(operator.is_, params, self._params))

    def take(self) -> bool:
        """Take up the step at hand, and return whether there are gradients for it."""
        group, grads = self.group, [param.grad for param in self._params]
        known, without = bases.described(self._base, group), [grad is None for grad in grads]
        settings = group["credit"], group["learn"], group["order"], group["interval"], group["scale_free"]
        kind = (known, settings, without)
        if kind != self._kind:
            choices.check_group(self._base, group)
            self._arrange(known, grads)
            self._kind = kind
        present = self._grads = [grad for grad in grads if grad is not None]
        states = [self._states.get(param, _NOT_YET) for param in self._with_grad]
        for item, place in self._seen:
            if not item.take(present[place], states[place]):
                self.ready = False
        if present and isinstance(known, Momentum) and self._is_plain and descent.is_free(group):
            self.descends = self._can_descend([state.get("momentum_buffer") for state in states])
        return bool(present)

    def _arrange(self, known: bases.Known | None, grads: list[Tensor | None]) -> None:
        """Sort out who has a gradient and how they are learned from."""
        learn = self.group["learn"]
        self.known, self.ready, self._descent = known, False, None
        self.items = [item for item, grad in zip(self._crew, grads, strict=True) if grad is not None]
        self.turning = [item for item in self.items if item.plan.shapes] if "precond" in learn else []
        self.learned = [name for name in learn if name != "precond"]  # settings, that is
        self._all_sure = all(item.is_sure for item in self.turning)
        self._with_grad = [item.param for item in self.items]
        seen = self.items if self.learned else self.turning
        self._seen = [(item, i) for i, item in enumerate(self.items) if item in seen]
        for item in self.items:
            if item not in self.turning:
                item.expire()
        # Whether P is credited with more than the last gradient, and with a tensor that only credit needs.
        self.velocity = self.group["credit"] == "velocity" and isinstance(known, Momentum | Adam)
        self.apart = not self.velocity or not isinstance(known, Momentum) or known.nesterov
        self.through_moments = isinstance(known, Adam) and not self.velocity

    @property
    def is_sure(self) -> bool:
        """Whether nothing can fail any more: the products are our own, and so is the step."""
        return self.descends and self._all_sure and not self.learned

    def _can_descend(self, velocities: list[Tensor | None]) -> bool:
        """Return whether the base's step can be taken for it."""
        if self._descent is None or not all(map(operator.is_, velocities, self._descent.velocities)):
            self._descent = descent.made(self._with_grad, velocities)
        return self._descent is not None and self._descent.suits(self._grads)

    def descend(self) -> None:
        """Take the base's step for it."""
        assert self._descent is not None  # as `descends` says
        along = self._grads.copy()
        for item, place in self._seen:
            if item.turned is not None:
                along[place] = item.turned
        self._descent.step(self.group, self.steered, along)

    def is_busy(self) -> bool:
        """Return whether there is more to do in this step than to use what was learned."""
        return not self.ready or self.group["fop_steps"] + 1 >= self._quiet_until or not self.moves

    def rest(self) -> None:
        """Find out for how long there will be no more to do than that."""
        self._quiet_until = min((item.next for item in self.turning), default=0) + self.rolls
        taken = [bool(item.own("taken")) for item in self.turning]
        self.ready = all(taken) if self.rolls else not any(taken)

    def is_due(self, item: Item) -> bool:
        """Return whether the parameter is to learn from the last step that it took."""
        if not item.own("taken") or self.group["fop_steps"] < item.next:
            return False
        return not item.own("rolled") or self._is_told(item)

    def stays(self, item: Item) -> bool:
        """Return whether what could be learned from an earlier step can be learned from this one as well."""
        return bool(item.own("taken") and item.own("rolled")) and not self.apart and self._is_told(item)

    def _is_told(self, item: Item) -> bool:
        """Return whether the state tells how a heavy ball has moved; of its lr it does not."""
        return self.group["scale_free"] and item.state.get("momentum_buffer") is not None

    def next(self) -> int:
        """Return the next step in which to learn: a multiple of the interval."""
        time, interval = self.group["fop_steps"], self.group["interval"]
        return time - time % interval + interval

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
    def gain(self) -> float:
        """Minus the derivative of the parameters in the direction of the last step, over its lr."""
        if not isinstance(self.known, Momentum) or not self.known.nesterov:
            return 1.0
        return 1.0 + float(self._last("momentum"))

    @property
    def rolls(self) -> bool:
        """Whether u and the velocity v' tell all about any last step: of a heavy ball, taken here.

        To rounding, θ moves by -lr v'; and what is free of scale is free of lr.
        """
        return self.descends and not self.apart and self.group["scale_free"]

    @property
    def moves(self) -> bool:
        """Whether the parameters will move at all: a step of lr zero teaches nothing."""
        return not bases.is_zero(self.group["lr"])

    def hyper(self, lr: Any, dtype: torch.dtype) -> Any:
        """Return the settings of the step as hyperparameters of the pure optimizer."""
        settings = {**self.group, **self.steered} if self.steered else self.group
        return bases.hyper(self.known, settings, lr, dtype)

    def last_hyper(self, lr: Any, dtype: torch.dtype) -> Any:
        """Return the settings of the last step, as those that are learned were then."""
        used = {name: self._last(name) for name in self.learned if name != "lr"}
        return bases.hyper(self.known, {**self.group, **used} if used else self.group, lr, dtype)

    def _last(self, name: str) -> Any:
        """Return a setting as it was in the last step, if it is learned."""
        used = self.group.get(f"{PREFIX}{name}_used") if name in self.learned else None
        return self.group[name] if used is None else used

    def signed(self, items: list[Item]) -> Params:
        """Return the gradients of what is minimized."""
        return {item.key: wide(bases.signed(self.group, item.grad)) for item in items}

    def write(self) -> None:
        """Write everything down, once the base has taken its step."""
        self.group["fop_steps"] += 1
        self.group.update(self.pending)
        for item, _ in self._seen:
            if item.entries:
                item.write()


def wide(x: Tensor) -> Tensor:
    """Return a tensor of half precision in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
