"""Does the derivative of one step point where the derivative of many steps points?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import grad, vmap

from experiments.runner.settings import FromZero
from experiments.studies.compare.digits import Digits
from metafop import Carry, Last, LowRank, Meta, Momentum, Training, tree
from metafop.hypergradients import adjoint, closed_form


@dataclass(frozen=True)
class Horizons:
    """Hypergradients at several points of training with momentum 0.9, by learning rate.

    All are derivatives of one outer loss, that of all validation digits, from one point on the same batches.
    "T steps" is exact, of the loss after T steps. "One step" is the online rule: of the loss after the first
    of them; "summed" is its sum over the T steps, where learning online would go meanwhile. Online, P is
    credited for the last gradient or, as by `Online` by default, for the whole velocity.
    """

    lrs: tuple[float, ...] = (0.003, 0.05, 0.3)  # too small, about right, too large
    points: tuple[FromZero[int], ...] = (0, 20, 100, 400)  # steps of training before
    steps: tuple[int, ...] = (1, 5, 20, 100)  # T
    networks: int = 16  # each trained on its own batches
    batch: int = 64  # images in a batch
    sigma: float = 0.1  # size of M in P = I + M Mᵀ: away from M = 0, where its derivative is zero

    def __post_init__(self) -> None:
        if 1 not in self.steps:
            raise ValueError(f"horizons.steps={self.steps} lacks 1, which is checked against. Name it too.")

    @property
    def ticks(self) -> int:
        return max(self.points) + max(self.steps) + len(self.points) * len(self.steps)


PARTS = {
    "lr": "learning rate",
    "momentum": "momentum",
    "M": "M, gradient credit",
    "M velocity": "M, velocity credit",
}
RULES = ("one step", "summed")
CHECKED = slice(0, 3)  # the parts for which one step is T = 1; velocity credit is for more than one step
By = dict[str, Tensor]  # a hypergradient by part: (lanes, numbers), a lane for each learning rate and network


class Agreement(NamedTuple):
    """One-step hypergradients against T-step ones: (parts, rules, lrs, points, steps, networks).

    The cosine of two numbers is 1 or -1: whether they have the same sign. It is 0 where one is zero. `ratios`
    are of norms, one step over T steps; `slopes` the T-step derivatives in lr, without parts and rules;
    `error` the largest relative difference at T = 1.
    """

    cosines: Tensor
    ratios: Tensor
    slopes: Tensor
    error: float

    def mean(self, part: str, rule: str) -> Tensor:
        """Return the mean cosine over networks: (lrs, points, steps)."""
        return self.cosines[list(PARTS).index(part), RULES.index(rule)].mean(-1)


class Trajectory(NamedTuple):
    """A training of all lanes: the carry at each point, and the one-step hypergradients of every window."""

    carries: dict[int, Carry]
    online: dict[int, By]


def trainer(settings: Horizons, digits: Digits) -> tuple[Training, Meta]:
    """Return momentum under P = I + M Mᵀ for each layer, and a meta for each lane."""
    families = {k: LowRank(sigma=settings.sigma) for k, p in digits.networks.items() if p.dim() == 3}
    training = Training(digits.loss, Momentum(), families)
    metas = []
    for lr in settings.lrs:
        for i in range(settings.networks):
            params, generator = digits.take(torch.tensor(i)), Generator().manual_seed(i)
            metas.append(training.init_meta(params, generator, lr=lr))
    return training, tree.stack(metas)


def measure(
    settings: Horizons, digits: Digits, generator: Generator, tick: Callable[[str], None]
) -> Agreement:
    """Train all lanes in one vmapped program, then unroll T steps from every point."""
    training, metas = trainer(settings, digits)
    length = max(settings.points) + max(settings.steps)
    order = digits.draw((settings.networks, length, settings.batch), generator)
    order = order.repeat(len(settings.lrs), 1, 1)  # every learning rate sees the same batches
    trained = train(settings, training, digits, metas, order, lambda: tick("one step at a time"))

    def many_steps(meta: Meta, carry: Carry, order: Tensor) -> Meta:
        return adjoint(training, digits.validation, meta, carry, list(order)).grads

    cosines, ratios, slopes, errors = [], [], [], [0.0]
    for point in settings.points:
        for steps in settings.steps:
            window = range(point, point + steps)
            unrolled = vmap(many_steps)(metas, trained.carries[point], order[:, window])
            exact = by_part(unrolled, unrolled)
            rules = [trained.online[point], summed([trained.online[t] for t in window])]
            cosines.append(paired(cosine, rules, exact))
            ratios.append(paired(ratio, rules, exact))
            slopes.append(exact["lr"])
            if steps == 1:
                errors.append(paired(relative_error, rules[:1], exact)[CHECKED].max().item())
            tick(f"through {steps} steps after {point}")

    shape = (len(settings.points), len(settings.steps), len(PARTS), len(RULES), len(settings.lrs), -1)
    by_rule = [torch.stack(found).view(shape).permute(2, 3, 4, 0, 1, 5) for found in (cosines, ratios)]
    by_lr = torch.stack(slopes).view(*shape[:2], len(settings.lrs), -1).permute(2, 0, 1, 3)
    return Agreement(by_rule[0], by_rule[1], by_lr, max(errors))


def train(
    settings: Horizons,
    training: Training,
    digits: Digits,
    metas: Meta,
    order: Tensor,
    tick: Callable[[], None],
) -> Trajectory:
    def ahead(meta: Meta, carry: Carry, memory: Any, batch: Tensor) -> tuple[Last, Carry, Any]:
        seen = training.evaluate(meta, carry, batch)
        credit, memory = training.credited(meta, memory, seen.grads)
        return Last(carry, seen, credit), training.advance(meta, carry, seen)[0], memory

    def one_step(meta: Meta, last: Last, after: Carry) -> tuple[Meta, Meta]:
        outer = grad(lambda params: digits.validation(Carry(params, after.opt, after.buffers)))(after.params)
        uncredited = Last(last.carry, last.seen, ())
        return closed_form(training, meta, uncredited, outer), closed_form(training, meta, last, outer)

    windows = {t for point in settings.points for t in range(point, point + max(settings.steps))}
    lanes = torch.arange(settings.networks).repeat(len(settings.lrs))
    trained, carry = Trajectory({}, {}), vmap(training.init)(digits.take(lanes))
    memory = vmap(training.init_memory)(carry)
    for t in range(max(windows) + 1):
        if t in settings.points:
            trained.carries[t] = carry
        step, carry, memory = vmap(ahead)(metas, carry, memory, order[:, t])
        if t in windows:
            trained.online[t] = by_part(*vmap(one_step)(metas, step, carry))
        tick()
    return trained


def by_part(grads: Meta, credited: Meta) -> By:
    """Return a hypergradient by part, given that with P credited for the gradient and for the velocity."""
    m, m_velocity = (
        torch.cat([m.flatten(1) for m in tree.leaves(x.precond)], dim=1) for x in (grads, credited)
    )
    return {
        "lr": grads.hyper.lr[:, None],
        "momentum": grads.hyper.momentum[:, None],
        "M": m,
        "M velocity": m_velocity,
    }


def summed(steps: Sequence[By]) -> By:
    return {k: torch.stack([step[k] for step in steps]).sum(0) for k in PARTS}


def paired(measure: Callable[[Tensor, Tensor], Tensor], rules: Sequence[By], exact: By) -> Tensor:
    """Return what is measured of each part and rule: (parts, rules, lanes)."""
    return torch.stack([torch.stack([measure(rule[k], exact[k]) for rule in rules]) for k in PARTS])


def cosine(x: Tensor, y: Tensor) -> Tensor:
    sizes = x.norm(dim=1) * y.norm(dim=1)
    return torch.where(sizes > 0, (x * y).sum(1) / sizes, 0.0)


def ratio(x: Tensor, y: Tensor) -> Tensor:
    return x.norm(dim=1) / y.norm(dim=1)


def relative_error(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).norm(dim=1) / y.norm(dim=1).clamp(min=torch.finfo(y.dtype).tiny)
