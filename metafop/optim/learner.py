"""One step of FOP in three parts: learn from the last step, turn the gradients, remember this one.

The mathematics is that of `Online`, called for the parameters of an ordinary model: the pure optimizer that
describes the base gives the derivative in the direction, the family that in m, and a pure optimizer moves m.
What is learned is written at once, and undone if the base's step fails; all else is written after it.
(docs/math.md, 26)
"""

from math import inf
from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.optim import bases
from metafop.optim.moves import Leaf, Mover, Steered
from metafop.optim.plans import m_of, start
from metafop.optim.work import Item, Work, wide
from metafop.optimizers import SGD, Adam
from metafop.preconditioners import stacks
from metafop.types import Params


class Learner:
    """What a step does besides the base's own."""

    def __init__(self, meta_optimizer: Steered) -> None:
        self.mover = Mover(meta_optimizer)

    def turn(self, work: Work) -> None:
        """Learn from the last step, and precondition the gradients of this one."""
        if not work.is_busy():
            self._precondition(work)
            return
        needs = work.needs
        for item in work.turning:
            item.find()
            if item.m is None:
                self._begin(work, item)
            if item.needs != needs:
                self._prepare(work, item)
        moves, soon = work.moves, work.group["fop_steps"] + 1
        due = [item for item in work.turning if work.is_due(item)] if moves else []
        if work.group["order"] == "paper":  # take this step with the old m
            self._precondition(work)
            self._learn(work, due)
        else:
            self._learn(work, due)
            self._precondition(work)
        if due:
            later = work.next()
            for item in due:
                item.next = later
                item.keep("next", later)
        if moves:
            for item in work.turning:
                item.stays = item not in due and work.stays(item)
            due_soon = [item for item in work.turning if soon >= item.next and not item.stays]
            self._hold(work, work.turning if work.rolls else due_soon)

    def undo(self, work: Work) -> None:
        """Put back what was learned in this step, and forget what was made of it."""
        for where, old in work.undo or []:
            torch._foreach_copy_(where, old)
        work.ready = False
        for item in work.turning:
            item.m, item.turn, item.needs = None, None, ()

    def remember(self, work: Work) -> None:
        """Keep what the next step needs to know of this one."""
        if work.velocity and work.turning:
            self._credit(work)
        if work.is_busy():
            self._record(work, [item for item in work.turning if item.recorded])
            for item in work.turning:
                item.keep("taken", int(item.recorded or item.stays))
            work.rest()
        work.write()

    def _record(self, work: Work, recorded: list[Item]) -> None:
        """Keep what is to be learned from this step."""
        lr = work.lr.clone() if isinstance(work.lr, Tensor) else work.lr
        for item in recorded:
            item.keep("lr", lr)
            item.keep("rolled", int(work.rolls))
            if not work.velocity:
                item.keep("credit", wide(bases.signed(work.group, item.grad)).clone())
        if recorded and not work.rolls:
            moved = [wide(item.before) for item in recorded if item.before is not None]
            torch._foreach_sub_(moved, [wide(item.param) for item in recorded])
            for item, size in zip(recorded, torch._foreach_norm(moved), strict=True):
                item.keep("moved", size)

    def _begin(self, work: Work, item: Item) -> None:
        """Take up a parameter, at its first step or from a state that was loaded."""
        if item.own("taken") is None:
            self._start(item)
            item.keep("next", work.next())
        item.next = item.own("next")
        item.m = m_of(item.plan, {**item.state, **item.entries})
        item.leaves, item.times = [], []
        for i, (x, is_learned) in enumerate(zip(tree.leaves(item.m), item.plan.learned, strict=True)):
            if is_learned:
                opt = [item.own(f"meta{i}_{j}") for j in range(self.mover.states)]
                item.leaves.append(Leaf(x, opt, item.own("updates")))
            else:
                item.times.append(x)

    def _start(self, item: Item) -> None:
        for i, leaf in enumerate(tree.leaves(start(item.param, item.plan.family, item.plan.seed))):
            item.keep(f"m{i}", leaf.contiguous())
            for j, x in enumerate(self.mover.init(leaf)):
                item.keep(f"meta{i}_{j}", x.contiguous())
        item.keep("updates", 0)
        item.keep("taken", 0)
        item.keep("lr", 0.0)
        item.keep("rolled", 0)
        item.keep("moved", wide(item.grad).new_zeros(()))

    def _prepare(self, work: Work, item: Item) -> None:
        """Make the entries that steps of this kind need, at the first one: settings may change in between.

        After it they are all there, for a state that is to be loaded has to have a place for everything.
        """
        for name in work.needs:
            if item.own(name) is None or (item.needs and name not in item.needs):  # or it is out of date
                item.keep("taken", 0)
                item.keep(name, torch.zeros_like(wide(item.grad), memory_format=torch.contiguous_format))
        if work.through_moments and item.own("held_time") is None:
            for name, x in bases.held(work.known, item.param, {}).items():
                item.keep(f"held_{name}", x)
        item.needs = work.needs

    def _precondition(self, work: Work) -> None:
        """Give each gradient its P g."""
        fresh = {item.key: item for item in work.turning if item.turn is None}
        if fresh:
            made = stacks.turners(
                {k: item.plan.family for k, item in fresh.items()},
                {k: item.m for k, item in fresh.items()},
                {k: item.grad for k, item in fresh.items()},
            )
            for k, item in fresh.items():
                item.turn = made[k]
        contiguous = work.descends
        for item in work.turning:
            grad = item.grad
            item.turned = turned = item.turn(grad)  # pyright: ignore
            if contiguous and item.is_sure:
                continue
            # Fused kernels take it that a gradient lies in memory as its parameter does, and do not look.
            if turned.nbytes != grad.nbytes:
                raise RuntimeError(
                    f"{item.plan.family} of {item.plan.name!r} makes {turned.dtype}, {tuple(turned.shape)}, "
                    f"of a gradient of {grad.dtype}, {tuple(grad.shape)}. "
                    "Let its apply return something like the gradient."
                )
            if turned.stride() != grad.stride():
                item.turned = torch.empty_like(grad).copy_(turned)

    def _learn(self, work: Work, due: list[Item]) -> None:
        """Move the m of each parameter by what its last step teaches."""
        if not due:
            return
        cotangents = work.signed(due)
        toward, sizes = self._toward(work, due, cotangents)
        pulled = stacks.pullbacks(
            {item.key: item.plan.family for item in due},
            {item.key: item.m for item in due},
            {item.key: item.own("credit" if work.apart else "memory") for item in due},
            toward,
        )
        if work.group["scale_free"]:
            sizes = [a * b for a, b in zip(sizes, self._sizes(due, cotangents), strict=True)]
        leaves, grads, over = [], [], []
        for item, size in zip(due, sizes, strict=True):
            h = pulled[item.key]
            found = [h] if isinstance(h, Tensor) else tree.leaves(h)
            learned = [x for x, is_learned in zip(found, item.plan.learned, strict=True) if is_learned]
            leaves += item.leaves
            grads += learned
            over += [size] * len(learned)
            for time in item.times:
                if work.undo is not None:
                    work.undo.append(([time], [time.clone()]))
                time += 1
        if leaves:
            self.mover.move(work.group["meta_lr"], leaves, list(torch._foreach_div(grads, over)), work.undo)
        for item in due:
            item.turn = None
            item.keep("updates", item.own("updates") + 1)

    def _sizes(self, due: list[Item], cotangents: Params) -> list[Any]:
        """Return ‖∇J‖ ‖Δθ‖ of each parameter, infinite where it is zero (docs/math.md, 14)."""
        rolled = [item.state["momentum_buffer"] for item in due if item.own("rolled")]  # Δθ = -v', at lr = 1
        norms: Any = torch._foreach_norm([*cotangents.values(), *rolled])
        on_cpu = norms[0].device.type == "cpu"  # elsewhere looking would have to wait
        norms = iter(map(float, norms) if on_cpu else norms)
        sizes = [next(norms) for _ in due]
        for i, item in enumerate(due):
            sizes[i] *= next(norms) if item.own("rolled") else item.own("moved")
        if on_cpu:
            return [float(size) if size > 0 else inf for size in sizes]
        return [torch.where(size > 0, size, inf) for size in sizes]

    def _toward(self, work: Work, due: list[Item], cotangents: Params) -> tuple[Params, list[Any]]:
        """Return the cotangent of what P is credited with, and by what its pullback is yet to be divided."""
        dtype = cotangents[due[0].key].dtype
        if dtype is not torch.float64 and not isinstance(work.known, Adam):
            # Pullbacks are linear, and M is smaller. In double precision the order is Online's, for its bits.
            used = [1.0 if item.own("rolled") else bases.number(item.own("lr")) for item in due]
            return cotangents, [-1 / (work.gain * lr) for lr in used]
        # One for each: some may have had no gradient for a while, and a scheduler went on.
        lrs = {item.key: item.own("lr") for item in due}
        hyper = work.last_hyper(lrs if len(set(lrs.values())) > 1 else lrs[due[0].key], dtype)
        rest = [1.0] * len(due)
        if work.known is None:
            return SGD().toward_after(hyper, (), cotangents), rest
        if not isinstance(work.known, Adam):
            return work.known.toward_after(hyper, (), cotangents), rest  # pyright: ignore
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
        return result, rest

    def _hold(self, work: Work, recorded: list[Item]) -> None:
        """Keep what the next step needs to know of the time before this one."""
        if not recorded:
            return
        if not work.rolls:
            copies = torch._foreach_mul([item.param for item in recorded], 1.0)
            for item, copy in zip(recorded, copies, strict=True):
                item.before = copy
        for item in recorded:
            item.recorded = True
            if work.through_moments and item.turned is not None:
                for name, x in bases.held(work.known, item.param, item.state).items():
                    item.keep(f"held_{name}", x.clone())
                seen = bases.direction(work.known, work.group, item.turned, item.param)
                item.keep("direction", wide(seen))

    def _credit(self, work: Work) -> None:
        """Bring up to date what the base's movement is made of."""
        if not work.apart:  # a heavy ball: u' = g + decay u, as in `Momentum.credit`, but in place
            decay = float(work.steered.get("momentum", work.group["momentum"]))
            plain = work.descends and not work.group["maximize"]
            for item in work.turning:
                u, grad = item.own("memory"), item.grad
                torch.add(grad if plain else wide(bases.signed(work.group, grad)), u, alpha=decay, out=u)
            return
        grads = work.signed(work.turning)
        memory = {item.key: item.own("memory") for item in work.turning}
        hyper = work.hyper(work.lr, grads[work.turning[0].key].dtype)
        credit, after = work.known.credit(hyper, memory, grads)  # pyright: ignore
        for item in work.turning:
            item.keep("memory", after[item.key])  # pyright: ignore
            if item.recorded:
                item.keep("credit", credit[item.key])  # pyright: ignore
