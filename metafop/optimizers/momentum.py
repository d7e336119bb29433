"""Gradient descent with momentum: heavy ball and Nesterov's."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.optimizers.domains import Positive, Unit
from metafop.optimizers.hyper import Value, alike, at, collect, negative, tensors
from metafop.protocols import Domains
from metafop.types import Params


class MomentumHyper(NamedTuple):
    """The hyperparameters of `Momentum`: `lr`, `momentum` and `weight_decay`.

    Each is a scalar or, by pattern of parameter names, a dict of these.
    """

    lr: Tensor | dict[str, Tensor]
    momentum: Tensor | dict[str, Tensor]
    weight_decay: Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Momentum:
    """Heavy-ball momentum (Polyak, 1964), as in `torch.optim.SGD` without dampening.

    e = d + weight_decay θ,    v' = momentum v + e,    θ' = θ - lr v'
    with `nesterov`                                    θ' = θ - lr (e + momentum v')

    Its hyperparameters are `lr`, `momentum` (0.9) and `weight_decay` (0), each a number, or a dict by pattern
    of parameter names. Its state is the velocity v. Zeros as the first velocity give torch's trajectory: no
    first-step branch.

    nesterov: whether θ moves by Nesterov's rule instead of the heavy ball's (False).

    >>> ball, params, ones = Momentum(), {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    >>> hyper, velocity = ball.hyper(lr=0.1, momentum=0.5), ball.init(params)
    >>> for _ in range(2):
    ...     params, velocity = ball.update(hyper, params, velocity, ones)
    >>> params["w"], velocity["w"]
    (tensor([-0.2500]), tensor([1.5000]))
    """

    nesterov: bool = False

    @property
    def domains(self) -> Domains:
        return {"lr": Positive(), "momentum": Unit(), "weight_decay": Positive()}

    def hyper(self, lr: Value, momentum: Value = 0.9, weight_decay: Value = 0.0) -> MomentumHyper:
        """Return the hyperparameters as tensors.

        lr: the learning rate, of zero or more.
        momentum: the factor by which the velocity is kept, from 0 to below 1 (0.9).
        weight_decay: the factor of θ that is added to d, of zero or more (0).
        """
        values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        return MomentumHyper(*tensors(self, self.domains, values))

    def init(self, params: Params) -> Params:
        return tree.zeros_like(params)

    def update(
        self, hyper: MomentumHyper, params: Params, opt: Params, direction: Params
    ) -> tuple[Params, Params]:
        velocity, ahead = self._moves(hyper, params, opt, direction)
        new = {k: torch.addcmul(p, at(hyper.lr, k), ahead[k], value=-1) for k, p in params.items()}
        return alike(new, params), alike(velocity, opt)

    def pullback(
        self, hyper: MomentumHyper, params: Params, opt: Params, direction: Params, cotangent: Params
    ) -> tuple[MomentumHyper, Params]:
        """∂d = -lr c,  ∂momentum = -lr ⟨c, v⟩  (docs/math.md, 6).

        With `nesterov`: ∂d = -lr (1 + momentum) c,  ∂momentum = -lr ⟨c, v' + momentum v⟩.
        """
        velocity, ahead = self._moves(hyper, params, opt, direction)
        toward = self.toward(hyper, params, opt, direction, cotangent)
        d_lr = {k: -tree.dot(c, ahead[k]) for k, c in cotangent.items()}
        d_weight_decay = {k: tree.dot(t, params[k]) for k, t in toward.items()}
        d_ahead = {k: -at(hyper.lr, k) * c for k, c in cotangent.items()}
        if self.nesterov:
            d_momentum = {
                k: tree.dot(a, torch.addcmul(velocity[k], at(hyper.momentum, k), opt[k]))
                for k, a in d_ahead.items()
            }
        else:
            d_momentum = {k: tree.dot(a, opt[k]) for k, a in d_ahead.items()}
        d_hyper = MomentumHyper(
            collect(hyper.lr, d_lr),
            collect(hyper.momentum, d_momentum),
            collect(hyper.weight_decay, d_weight_decay),
        )
        return d_hyper, toward

    def init_memory(self, params: Params) -> Params:
        return tree.zeros_like(params)

    def credit(self, hyper: MomentumHyper, memory: Params, grads: Params) -> tuple[Params, Params]:
        """u' = momentum u + g; credit u', or with `nesterov` (g + momentum u') / (1 + momentum).

        (docs/math.md, 12)
        """
        memory = {k: torch.addcmul(grads[k], at(hyper.momentum, k), u) for k, u in memory.items()}
        if not self.nesterov:
            return memory, memory
        credit = {
            k: torch.addcmul(g, at(hyper.momentum, k), memory[k]) / (1 + at(hyper.momentum, k))
            for k, g in grads.items()
        }
        return credit, memory

    def toward(
        self, hyper: MomentumHyper, params: Params, opt: Params, direction: Params, cotangent: Params
    ) -> Params:
        return self.toward_after(hyper, opt, cotangent)

    def toward_after(self, hyper: MomentumHyper, opt: Params, cotangent: Params) -> Params:
        """Return `toward` of `hyper` and `cotangent`, given as `opt` the state after the step."""
        gain = negative(hyper.lr)
        if self.nesterov:
            return {k: at(gain, k) * (1 + at(hyper.momentum, k)) * c for k, c in cotangent.items()}
        return {k: at(gain, k) * c for k, c in cotangent.items()}

    def _moves(
        self, hyper: MomentumHyper, params: Params, velocity: Params, direction: Params
    ) -> tuple[Params, Params]:
        """Return v' and what θ moves along. Products and sums in torch.optim's order, for its bits."""
        decayed = {k: torch.addcmul(d, at(hyper.weight_decay, k), params[k]) for k, d in direction.items()}
        velocity = {k: at(hyper.momentum, k) * v + decayed[k] for k, v in velocity.items()}
        if not self.nesterov:
            return velocity, velocity
        ahead = {k: torch.addcmul(e, at(hyper.momentum, k), velocity[k]) for k, e in decayed.items()}
        return velocity, ahead
