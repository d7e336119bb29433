"""One step of FOP in three parts: learn from the last step, turn the gradients, remember this one.

The mathematics is that of `Online`, called for the parameters of an ordinary model: the pure optimizer that
describes the base gives the derivative in the direction, the family that in m, and a pure optimizer moves m.
Nothing is written into a state before the base has taken its step. (docs/math.md, 26)
"""

from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.optim import bases
from metafop.optim.moves import Leaf, Mover, Steered
from metafop.optim.plans import PREFIX, Plan, m_of, start
from metafop.optimizers import SGD, Adam, Momentum
from metafop.preconditioners import stacks
from metafop.types import Params, Tree


class Item:
    """A parameter with a gradient, in one step."""

    def __init__(self, key: str, param: Tensor, grad: Tensor, plan: Plan, state: dict[str, Any]) -> None:
        self.key, self.param, self.grad, self.plan, self.state = key, param, grad, plan, state
        self.m: Tree = ()
        self.turned: Tensor | None = None  # P g, where there is a P
        self.before: Tensor | None = None  # the parameter before the step, if the next may learn from it
        self.entries: dict[str, Any] = {}  # what is to be written into the state

    def own(self, name: str) -> Any:
        """Return an entry of FOP's, or None."""
        name = PREFIX + name
        return self.entries[name] if name in self.entries else self.state.get(name)

    def keep(self, name: str, value: Any) -> None:
        self.entries[PREFIX + name] = value


class Work:
    """The parameters of a group that have a gradient, and what is known about their step."""

    def __init__(self, base: type, group: dict[str, Any], items: list[Item]) -> None:
        self.group, self.items = group, items
        self.steered: dict[str, Any] = {}  # settings that are learned, as the step uses them
        self.pending: dict[str, Any] = {}  # what is to be written into the group
        self.known = bases.described(base, group)
        learned = "precond" in group["learn"]
        self.turning = [item for item in items if item.plan.shapes] if learned else []
        # Whether P is credited with more than the last gradient.
        self.velocity = group["credit"] == "velocity" and isinstance(self.known, Momentum | Adam)

    @property
    def lr(self) -> float | Tensor:
        return self.steered.get("lr", self.group["lr"])

    @property
    def moves(self) -> bool:
        """Whether the parameters will move at all: a step of lr zero teaches nothing."""
        return not bases.is_zero(self.lr)

    def hyper(self, lr: Any, dtype: torch.dtype) -> Any:
        """Return the settings of the step as hyperparameters of the pure optimizer."""
        return bases.hyper(self.known, {**self.group, **self.steered} if self.steered else self.group, lr, dtype)

    def due(self, item: Item, time: int) -> bool:
        return time % (self.group["interval"] or item.plan.patience) == 0

    def signed(self, items: list[Item]) -> Params:
        """Return the gradients of what is minimized."""
        return {item.key: wide(bases.signed(self.group, item.grad)) for item in items}

    def write(self) -> None:
        self.group.update(self.pending)
        for item in self.items:
            item.state.update(item.entries)


class Learner:
    """What a step does besides the base's own. It holds nothing that cannot be made anew."""

    def __init__(self, meta_optimizer: Steered) -> None:
        self.mover = Mover(meta_optimizer)
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"meta_optimizer": self.mover.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def forget(self) -> None:
        """Forget what was made of the m of every parameter: it may have changed."""
        self._factors: dict[Tensor, Any] = {}

    def turn(self, work: Work) -> None:
        """Learn from the last step, and precondition the gradients of this one."""
        moves, time = work.moves, work.group["fop_steps"]
        due = []
        for item in work.turning:
            if item.own("taken") is None:
                self._begin(work, item)
                continue
            item.m = m_of(item.plan, item.state)
            if moves and item.own("taken") and work.due(item, time):
                due.append(item)
        if work.group["order"] == "paper":  # take this step with the old m
            self._precondition(work.turning)
            self._learn(work, due)
        else:
            self._learn(work, due)
            self._precondition(work.turning)
        for item in work.turning:
            if moves and work.due(item, time + 1):
                self._hold(work, item)

    def remember(self, work: Work) -> None:
        """Keep what the next step needs to know of this one."""
        if work.velocity and work.turning:
            self._credit(work)
        recorded = [item for item in work.turning if item.before is not None]
        if recorded:
            moved = [wide(item.before) for item in recorded if item.before is not None]
            torch._foreach_sub_(moved, [wide(item.param) for item in recorded])
            for item, size in zip(recorded, torch._foreach_norm(moved), strict=True):
                item.keep("moved", size)
                if not work.velocity:
                    item.keep("credit", wide(bases.signed(work.group, item.grad)).clone())
        for item in work.turning:
            item.keep("taken", int(item.before is not None))
            item.keep("lr", work.lr.clone() if isinstance(work.lr, Tensor) else work.lr)
        work.pending["fop_steps"] = work.group["fop_steps"] + 1

    def _begin(self, work: Work, item: Item) -> None:
        """Start a parameter. Every entry that its state will ever have is there from its first step on."""
        item.m = start(item.param, item.plan.family, item.plan.seed)
        for i, leaf in enumerate(tree.leaves(item.m)):
            item.keep(f"m{i}", leaf)
            for j, x in enumerate(self.mover.init(leaf)):
                item.keep(f"meta{i}_{j}", x)
        nothing = torch.zeros_like(wide(item.grad))
        item.keep("updates", 0)
        item.keep("moved", nothing.new_zeros(()))
        if work.velocity:
            item.keep("memory", nothing)
        if not work.velocity or _is_apart(work.known):
            item.keep("credit", nothing)
        if _is_through_moments(work):
            for name, x in bases.held(work.known, item.param, {}).items():
                item.keep(f"held_{name}", x)
            item.keep("direction", nothing)

    def _precondition(self, turning: list[Item]) -> None:
        """Give each gradient its P g. What P is made of is kept until its m moves."""
        fresh = {item.key: item for item in turning if item.param not in self._factors}
        if fresh:
            made = stacks.factors(
                {k: item.plan.family for k, item in fresh.items()},
                {k: item.m for k, item in fresh.items()},
                {k: item.grad for k, item in fresh.items()},
            )
            self._factors.update({item.param: made[k] for k, item in fresh.items()})
        for item in turning:
            item.turned = stacks.turn(item.plan.family, self._factors[item.param], item.grad)

    def _learn(self, work: Work, due: list[Item]) -> None:
        """Move the m of each parameter by what its last step teaches."""
        if not due:
            return
        cotangents = work.signed(due)
        pulled = stacks.pullbacks(
            {item.key: item.plan.family for item in due},
            {item.key: item.m for item in due},
            {item.key: _credited(item) for item in due},
            self._toward(work, due, cotangents),
        )
        sizes: list[Tensor] | list[None] = [None] * len(due)
        if work.group["scale_free"]:
            norms = torch.stack(torch._foreach_norm(list(cotangents.values())))
            sizes = list((norms * torch.stack([item.own("moved") for item in due])).unbind())
        leaves, places = [], []
        for item, size in zip(due, sizes, strict=True):
            for i, h in enumerate(tree.leaves(pulled[item.key])):
                if item.plan.learned[i]:
                    opt = [item.own(f"meta{i}_{j}") for j in range(self.mover.states)]
                    leaves.append(Leaf(item.own(f"m{i}"), h, size, opt, item.own("updates")))
                    places.append((item, i))
                else:  # a time, which passes
                    item.keep(f"m{i}", item.own(f"m{i}") + 1)
        for (item, i), (value, opt) in zip(places, self.mover.moved(work.group["meta_lr"], leaves), strict=True):
            item.keep(f"m{i}", value)
            for j, x in enumerate(opt):
                item.keep(f"meta{i}_{j}", x)
        for item in due:
            item.keep("updates", item.own("updates") + 1)
            item.m = m_of(item.plan, item.state | item.entries)
            self._factors.pop(item.param, None)

    def _toward(self, work: Work, due: list[Item], cotangents: Params) -> Params:
        """Return the cotangent of the direction, or of the movement that P is credited with."""
        lrs = {item.key: item.own("lr") for item in due}
        lr = lrs if len(set(lrs.values())) > 1 else lrs[due[0].key]  # some may have had no gradient for a while
        hyper = work.hyper(lr, cotangents[due[0].key].dtype)
        if work.known is None:
            return SGD().toward_after(hyper, (), cotangents)
        if not isinstance(work.known, Adam):
            return work.known.toward_after(hyper, (), cotangents)  # pyright: ignore
        result = {}
        for item in due:
            k, c = item.key, cotangents[item.key]
            if work.velocity:
                after = bases.opt(work.known, k, bases.held(work.known, item.param, item.state), c.dtype)
                result |= work.known.toward_after(hyper, after, {k: c})
            else:
                held = {name: item.own(f"held_{name}") for name in ("time", "mean", "square")}
                before = bases.opt(work.known, k, held, c.dtype)
                at = (hyper, {k: wide(item.param)}, before, {k: item.own("direction")}, {k: c})
                result |= work.known.pullback(*at)[1]
        return result

    def _hold(self, work: Work, item: Item) -> None:
        """Keep what the next step needs to know of the time before this one."""
        item.before = item.param.clone()
        if _is_through_moments(work) and item.turned is not None:
            for name, x in bases.held(work.known, item.param, item.state).items():
                item.keep(f"held_{name}", x.clone())
            seen = bases.direction(work.known, work.group, item.turned, item.param)
            item.keep("direction", wide(seen))

    def _credit(self, work: Work) -> None:
        """Bring up to date what the base's movement is made of."""
        grads = work.signed(work.turning)
        hyper = work.hyper(work.lr, grads[work.turning[0].key].dtype)
        memory = {item.key: item.own("memory") for item in work.turning}
        credit, memory = work.known.credit(hyper, memory, grads)  # pyright: ignore
        for item in work.turning:
            item.keep("memory", memory[item.key])
            if item.before is not None and _is_apart(work.known):
                item.keep("credit", credit[item.key])


def _credited(item: Item) -> Tensor:
    credit = item.own("credit")
    return item.own("memory") if credit is None else credit


def _is_apart(known: bases.Known | None) -> bool:
    """Whether credit is another tensor than its memory: it is the same for a heavy ball alone."""
    return not isinstance(known, Momentum) or known.nesterov


def _is_through_moments(work: Work) -> bool:
    return isinstance(work.known, Adam) and not work.velocity


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
