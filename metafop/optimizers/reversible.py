"""Momentum whose every step can be undone, bit for bit: no step needs to be kept to come back to it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.optimizers.domains import Positive, Unit
from metafop.optimizers.hyper import Value, at, tensors
from metafop.optimizers.momentum import Momentum, MomentumHyper
from metafop.protocols import Domains
from metafop.types import Params


class ReversibleState(NamedTuple):
    """What makes a step reversible besides the parameters, by parameter name.

    velocity: v, a whole number of units of 2^-bits, in float64.
    rest: what the position has beyond the precision of the parameters, in such units.
    store: the remainders that momentum has left so far.
    """

    velocity: Params
    rest: dict[str, Tensor]
    store: dict[str, Tensor]


@dataclass(frozen=True)
class ReversibleMomentum:
    """Heavy-ball momentum that loses no information (Maclaurin, Duvenaud & Adams, 2015).

    v' = momentum v + d + weight_decay θ,    θ' = θ - lr v'

    in whole numbers of units of 2^-bits. The gradient and lr v' are rounded before they are added, so that
    the same roundings undo them. momentum is a fraction n/m: what v has beyond a multiple of m goes into a
    store of whole numbers, which fills it up beyond a multiple of n.

    store ← store m + v mod m,    v ← ⌊v/m⌋ n + store mod n,    store ← ⌊store/n⌋

    The same with n and m exchanged undoes it. The store grows by log₂(m/n) bits a step, .152 at 9/10. Before
    it would overflow 63 bits it starts from zero again: to undo that step takes what `emptied` returned then.

    Derivatives are those of momentum with these values: a rounding has derivative 1. Its hyperparameters are
    those of `Momentum`, but the momentum is above zero. (docs/math.md, 24)

    bits: how many a number has after the point, from 1 to 51 (40). Values are exact up to ±2^(52 - bits), and
        not a number beyond.
    denominator: momentum is rounded to a multiple of 1/denominator within (0, 1); from 2 to 2^bits (1000).

    >>> ball, params, ones = ReversibleMomentum(), {"w": torch.tensor([0.3])}, {"w": torch.ones(1)}
    >>> hyper, opt = ball.hyper(lr=0.1, momentum=0.5), ball.init(params)
    >>> after, moved = ball.update(hyper, params, opt, ones)
    >>> after["w"], moved.velocity["w"]
    (tensor([0.2000]), tensor([1.], dtype=torch.float64))
    >>> before, half = ball.before(hyper, after, moved)
    >>> before == params, ball.undo(hyper, before, half, ones, {}) == opt
    (True, True)
    """

    bits: int = 40
    denominator: int = 1000

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 51:
            raise ValueError(
                f"ReversibleMomentum takes from 1 to 51 bits after the point, got bits={self.bits}. "
                "Pass 40 for values up to 4096; each bit less doubles that."
            )
        if not 2 <= self.denominator <= 2**self.bits:
            raise ValueError(
                f"ReversibleMomentum takes a denominator from 2 to 2^{self.bits}, got {self.denominator}. "
                "Pass 1000 for a momentum of three decimals."
            )

    @property
    def domains(self) -> Domains:
        return {"lr": Positive(), "momentum": Unit(), "weight_decay": Positive()}

    def hyper(self, lr: Value, momentum: Value = 0.9, weight_decay: Value = 0.0) -> MomentumHyper:
        """Return the hyperparameters as tensors.

        lr: the learning rate, of zero or more.
        momentum: the factor by which the velocity is kept, above 0 and below 1 (0.9).
        weight_decay: the factor of θ that is added to d, of zero or more (0).
        """
        values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        hyper = MomentumHyper(*tensors(self, self.domains, values))
        if any(tree.is_concrete(x) and x == 0 for x in tree.leaves(hyper.momentum)):
            raise ValueError(
                f"{self}.hyper takes a momentum above 0, got 0, after which no velocity could be recovered. "
                "Pass a small one, or use SGD."
            )
        return hyper

    def init(self, params: Params) -> ReversibleState:
        return ReversibleState(
            {k: torch.zeros_like(p, dtype=torch.float64) for k, p in params.items()},
            {k: torch.zeros_like(p, dtype=torch.int64) for k, p in params.items()},
            {k: torch.zeros_like(p, dtype=torch.int64) for k, p in params.items()},
        )

    def update(
        self, hyper: MomentumHyper, params: Params, opt: ReversibleState, direction: Params
    ) -> tuple[Params, ReversibleState]:
        new, velocity, rest, store = {}, {}, {}, {}
        for k, p in params.items():
            n, m, momentum = self._fraction(at(hyper.momentum, k))
            position = self._position(p, opt.rest[k])
            kept = torch.where(_full(opt.store[k], m), 0, opt.store[k])
            scaled, store[k] = self._scaled(opt.velocity[k], kept, n, m)
            scaled = _through(scaled, momentum * opt.velocity[k])
            velocity[k] = self._within(scaled + self._force(hyper, k, position, direction))
            moved = self._within(position - self._move(hyper, k, velocity))
            new[k], rest[k] = self._split(moved, p)
        return new, ReversibleState(velocity, rest, store)

    def before(
        self, hyper: MomentumHyper, params: Params, opt: ReversibleState
    ) -> tuple[Params, ReversibleState]:
        """θ = θ' + lr v'"""
        old, rest = {}, {}
        for k, p in params.items():
            position = self._position(p, opt.rest[k]) + self._move(hyper, k, opt.velocity)
            old[k], rest[k] = self._split(position, p)
        return old, ReversibleState(opt.velocity, rest, opt.store)

    def undo(
        self,
        hyper: MomentumHyper,
        params: Params,
        opt: ReversibleState,
        direction: Params,
        emptied: dict[str, Tensor],
    ) -> ReversibleState:
        """v = (v' - d - weight_decay θ) / momentum"""
        velocity, store = {}, {}
        for k, p in params.items():
            n, m, _ = self._fraction(at(hyper.momentum, k))
            scaled = opt.velocity[k] - self._force(hyper, k, self._position(p, opt.rest[k]), direction)
            velocity[k], kept = self._scaled(scaled, opt.store[k], m, n)
            store[k] = emptied.get(k, kept)
        return ReversibleState(velocity, opt.rest, store)

    def emptied(self, hyper: MomentumHyper, opt: ReversibleState) -> dict[str, Tensor]:
        full = {k: _full(s, self._fraction(at(hyper.momentum, k))[1]) for k, s in opt.store.items()}
        return {k: s for k, s in opt.store.items() if full[k]}

    def pullback(
        self,
        hyper: MomentumHyper,
        params: Params,
        opt: ReversibleState,
        direction: Params,
        cotangent: Params,
    ) -> tuple[MomentumHyper, Params]:
        return tree.pull(lambda x: self.update(x[0], params, opt, x[1])[0], (hyper, direction), cotangent)

    def init_memory(self, params: Params) -> Params:
        return _BALL.init_memory(params)

    def credit(self, hyper: MomentumHyper, memory: Params, grads: Params) -> tuple[Params, Params]:
        """That of `Momentum`, with the momentum as rounded."""
        momentum = tree.map(lambda x: self._fraction(x)[2].to(x.dtype), hyper.momentum)
        return _BALL.credit(MomentumHyper(hyper.lr, momentum, hyper.weight_decay), memory, grads)

    def toward(
        self,
        hyper: MomentumHyper,
        params: Params,
        opt: ReversibleState,
        direction: Params,
        cotangent: Params,
    ) -> Params:
        return _BALL.toward(hyper, params, opt.velocity, direction, cotangent)

    def _fraction(self, momentum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return n and m, in lowest terms, for they disturb v by up to n units; and n/m itself."""
        nearest = (momentum.detach().double() * self.denominator).round()
        n = nearest.clamp(1, self.denominator - 1).to(torch.int64)
        common = torch.gcd(n, torch.full_like(n, self.denominator))
        n, m = n // common, self.denominator // common
        return n, m, _through(n.double() / m, momentum.double())

    def _force(self, hyper: MomentumHyper, name: str, position: Tensor, direction: Params) -> Tensor:
        return self._whole(direction[name].double() + at(hyper.weight_decay, name).double() * position)

    def _move(self, hyper: MomentumHyper, name: str, velocity: Params) -> Tensor:
        return self._whole(at(hyper.lr, name).double() * velocity[name])

    def _scaled(self, v: Tensor, store: Tensor, n: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """Return v n/m, and the store with what that leaves over. With n and m exchanged, its own inverse."""
        units = (v * 2.0**self.bits).to(torch.int64)
        store = store * m + units % m
        return (units // m * n + store % n).double() * 2.0**-self.bits, store // n

    def _position(self, param: Tensor, rest: Tensor) -> Tensor:
        """Return θ in float64. The first parameters may lie between whole units."""
        return self._whole(param.double()) + rest.double() * 2.0**-self.bits

    def _split(self, position: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return θ in the precision of the parameters, and the rest."""
        param = position.to(like.dtype)
        return param, ((position - param) * 2.0**self.bits).to(torch.int64)

    def _whole(self, x: Tensor) -> Tensor:
        """Return x rounded to whole units: in this range, sums of such numbers are exact."""
        return _through((x.detach() * 2.0**self.bits).round() * 2.0**-self.bits, x)

    def _within(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() < 2.0 ** (52 - self.bits), x, torch.nan)


_BALL = Momentum()


def _through(hard: Tensor, smooth: Tensor) -> Tensor:
    """Return `hard`, every bit of it, with the derivative of `smooth`."""
    return hard + (smooth - smooth.detach())


def _full(store: Tensor, m: Tensor) -> Tensor:
    """Return whether the store of a parameter could overflow when multiplied by m."""
    return (store >= torch.iinfo(torch.int64).max // m).any()
