"""One step of FOP in three parts: learn from the last step, turn the gradients, remember this one.

The mathematics is that of `Online`, called for the parameters of an ordinary model: the pure optimizer that
describes the base gives the derivative in the direction, the family that in m, and a pure optimizer moves m.
What is learned is written at once, and undone if the base's step fails; all else is written after it.
(docs/math.md, 26)
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

_NOT_YET: dict[str, Any] = {}


class Item:
    """A parameter: what lasts from step to step, and what belongs to the step at hand."""

    def __init__(self, key: str, param: Tensor, plan: Plan, states: dict[Tensor, dict[str, Any]]) -> None:
        self.key, self.param, self.plan, self._states = key, param, plan, states
        self.state: dict[str, Any] = _NOT_YET  # the optimizer's entry for the parameter
        self.m: Tree = None  # its family's tensors, which are entries of the state
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
        if self.state is _NOT_YET:
            self.state = self._states[self.param]
        self.grad, self.turned, self.before, self.entries = grad, None, None, {}
        return True

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
        return not bases.is_zero(self.lr)

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
            if item.entries:
                item.state.update(item.entries)


class Learner:
    """What a step does besides the base's own."""

    def __init__(self, meta_optimizer: Steered) -> None:
        self.mover = Mover(meta_optimizer)

    def turn(self, work: Work) -> None:
        """Learn from the last step, and precondition the gradients of this one."""
        group, time, moves = work.group, work.group["fop_steps"], work.moves
        due = []
        for item in work.turning:
            if item.m is None:
                self._begin(work, item)
            every = group["interval"] or item.plan.patience
            if moves and time % every == 0 and item.state.get("fop_taken"):
                due.append(item)
            if moves and (time + 1) % every == 0:
                item.before = item.param
        if group["order"] == "paper":  # take this step with the old m
            self._precondition(work.turning)
            self._learn(work, due)
        else:
            self._learn(work, due)
            self._precondition(work.turning)
        self._hold(work, [item for item in work.turning if item.before is not None])

    def undo(self, work: Work) -> None:
        """Put back what was learned in this step, and forget what was made of it."""
        for where, old in work.undo:
            torch._foreach_copy_(where, old)
        for item in work.turning:
            item.m = item.factor = None

    def remember(self, work: Work) -> None:
        """Keep what the next step needs to know of this one."""
        recorded = [item for item in work.turning if item.before is not None]
        if work.velocity and work.turning:
            self._credit(work)
        if recorded:
            moved = [wide(item.before) for item in recorded if item.before is not None]
            torch._foreach_sub_(moved, [wide(item.param) for item in recorded])
            for item, size in zip(recorded, torch._foreach_norm(moved), strict=True):
                item.keep("moved", size)
                if not work.velocity:
                    item.keep("credit", wide(bases.signed(work.group, item.grad)).clone())
        lr = work.lr.clone() if isinstance(work.lr, Tensor) else work.lr
        for item in work.turning:
            item.keep("taken", int(item.before is not None))
            if item.before is not None:
                item.keep("lr", lr)
                item.keep("updates", item.leaves[0].age if item.leaves else 0)
        work.pending["fop_steps"] = work.group["fop_steps"] + 1

    def _begin(self, work: Work, item: Item) -> None:
        """Take up a parameter, at its first step or from a state that was loaded.

        Every entry that the state will ever have is there from the first step on.
        """
        if "fop_taken" not in item.state:
            self._start(work, item)
        item.m = m_of(item.plan, {**item.state, **item.entries})
        item.leaves = [
            Leaf(leaf, [item.own(f"meta{i}_{j}") for j in range(self.mover.states)], item.own("updates"))
            for i, leaf in enumerate(tree.leaves(item.m))
            if item.plan.learned[i]
        ]

    def _start(self, work: Work, item: Item) -> None:
        for i, leaf in enumerate(tree.leaves(start(item.param, item.plan.family, item.plan.seed))):
            item.keep(f"m{i}", leaf.contiguous())
            for j, x in enumerate(self.mover.init(leaf)):
                item.keep(f"meta{i}_{j}", x.contiguous())
        nothing = torch.zeros_like(wide(item.grad), memory_format=torch.contiguous_format)
        item.keep("updates", 0)
        item.keep("lr", 0.0)
        item.keep("moved", nothing.new_zeros(()))
        if work.velocity:
            item.keep("memory", nothing)
        if not work.velocity or _is_apart(work.known):
            item.keep("credit", nothing.clone())
        if _is_through_moments(work):
            for name, x in bases.held(work.known, item.param, {}).items():
                item.keep(f"held_{name}", x)
            item.keep("direction", nothing.clone())

    def _precondition(self, turning: list[Item]) -> None:
        """Give each gradient its P g."""
        fresh = {item.key: item for item in turning if item.factor is None}
        if fresh:
            made = stacks.factors(
                {k: item.plan.family for k, item in fresh.items()},
                {k: item.m for k, item in fresh.items()},
                {k: item.grad for k, item in fresh.items()},
            )
            for k, item in fresh.items():
                item.factor = made[k]
        for item in turning:
            item.turned = stacks.turn(item.plan.family, item.factor, item.grad)

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
        leaves, grads, sizes = [], [], []
        safe = self._sizes(due, cotangents) if work.group["scale_free"] else None
        for place, item in enumerate(due):
            found = tree.leaves(pulled[item.key])
            learned = [h for h, is_learned in zip(found, item.plan.learned, strict=True) if is_learned]
            leaves += item.leaves
            grads += learned
            sizes += [safe[place]] * len(learned) if safe else []
            for time in _times(item):  # which pass, and are not learned
                work.undo.append(([time], [time.clone()]))
                time += 1
        grads = torch._foreach_div(grads, sizes) if safe else grads
        work.undo += self.mover.move(work.group["meta_lr"], leaves, grads)
        for item in due:
            item.factor = None

    def _sizes(self, due: list[Item], cotangents: Params) -> list[Tensor]:
        """Return ‖∇J‖ ‖Δθ‖ of each parameter, infinite where it is zero (docs/math.md, 14)."""
        norms = torch.stack(torch._foreach_norm(list(cotangents.values())))
        sizes = norms * torch.stack([item.own("moved") for item in due])
        return list(torch.where(sizes > 0, sizes, torch.inf).unbind())

    def _toward(self, work: Work, due: list[Item], cotangents: Params) -> Params:
        """Return the cotangent of the direction, or of the movement that P is credited with."""
        lrs = {item.key: item.own("lr") for item in due}
        lr = (
            lrs if len(set(lrs.values())) > 1 else lrs[due[0].key]
        )  # some may have had no gradient for a while
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

    def _hold(self, work: Work, recorded: list[Item]) -> None:
        """Keep what the next step needs to know of the time before this one."""
        if not recorded:
            return
        copies = torch._foreach_mul([item.param for item in recorded], 1.0)
        for item, copy in zip(recorded, copies, strict=True):
            item.before = copy
            if _is_through_moments(work) and item.turned is not None:
                for name, x in bases.held(work.known, item.param, item.state).items():
                    item.keep(f"held_{name}", x.clone())
                seen = bases.direction(work.known, work.group, item.turned, item.param)
                item.keep("direction", wide(seen))

    def _credit(self, work: Work) -> None:
        """Bring up to date what the base's movement is made of."""
        grads = work.signed(work.turning)
        memory = {item.key: item.own("memory") for item in work.turning}
        if not _is_apart(work.known):  # a heavy ball: u' = g + decay u, as in `Momentum.credit`, but in place
            decay = float(work.steered.get("momentum", work.group["momentum"]))
            for item in work.turning:
                u = memory[item.key]
                torch.add(grads[item.key], u, alpha=decay, out=u)
            return
        hyper = work.hyper(work.lr, grads[work.turning[0].key].dtype)
        credit, after = work.known.credit(hyper, memory, grads)  # pyright: ignore
        for item in work.turning:
            item.keep("memory", after[item.key])  # pyright: ignore
            if item.before is not None:
                item.keep("credit", credit[item.key])  # pyright: ignore


def _times(item: Item) -> list[Tensor]:
    return [x for x, learned in zip(tree.leaves(item.m), item.plan.learned, strict=True) if not learned]


def _credited(item: Item) -> Tensor:
    credit = item.own("credit")
    return item.own("memory") if credit is None else credit


def _is_apart(known: bases.Known | None) -> bool:
    """Whether credit is another tensor than its memory: it is the same for a heavy ball alone."""
    return not isinstance(known, Momentum) or known.nesterov


def _is_through_moments(work: Work) -> bool:
    return isinstance(work.known, Adam) and not work.velocity


def wide(x: Tensor) -> Tensor:
    """Return a tensor of half precision in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
