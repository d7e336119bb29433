"""Gradient descent."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.optimizers.domains import Positive
from metafop.optimizers.hyper import Value, alike, at, collect, negative, tensors
from metafop.protocols import Domains
from metafop.types import Params


class SGDHyper(NamedTuple):
    """The hyperparameters of `SGD`: `lr` and `weight_decay`.

    Each is a scalar or, by pattern of parameter names, a dict of these.
    """

    lr: Tensor | dict[str, Tensor]
    weight_decay: Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class SGD:
    """Gradient descent, with weight decay as in `torch.optim.SGD`.

    θ' = θ - lr (d + weight_decay θ)

    Its hyperparameters are `lr` and `weight_decay` (0), each a number, or a dict by pattern of parameter
    names.

    >>> hyper = SGD().hyper(lr=0.1)
    >>> params, _ = SGD().update(hyper, {"w": torch.ones(2)}, (), {"w": torch.ones(2)})
    >>> params["w"]
    tensor([0.9000, 0.9000])
    """

    @property
    def domains(self) -> Domains:
        return {"lr": Positive(), "weight_decay": Positive()}

    def hyper(self, lr: Value, weight_decay: Value = 0.0) -> SGDHyper:
        """Return the hyperparameters as tensors.

        lr: the learning rate, of zero or more.
        weight_decay: the factor of θ that is added to d, of zero or more (0).
        """
        return SGDHyper(*tensors(self, self.domains, {"lr": lr, "weight_decay": weight_decay}))

    def init(self, params: Params) -> tuple[()]:
        return ()

    def update(
        self, hyper: SGDHyper, params: Params, opt: tuple[()], direction: Params
    ) -> tuple[Params, tuple[()]]:
        moves = self._moves(hyper, params, direction)
        new = {k: torch.addcmul(p, at(hyper.lr, k), moves[k], value=-1) for k, p in params.items()}
        return alike(new, params), ()

    def pullback(
        self, hyper: SGDHyper, params: Params, opt: tuple[()], direction: Params, cotangent: Params
    ) -> tuple[SGDHyper, Params]:
        """∂lr = -⟨c, d + weight_decay θ⟩,  ∂weight_decay = -lr ⟨c, θ⟩,  ∂d = -lr c  (docs/math.md, 5)."""
        moves = self._moves(hyper, params, direction)
        toward = self.toward(hyper, params, opt, direction, cotangent)
        d_lr = {k: -tree.dot(c, moves[k]) for k, c in cotangent.items()}
        d_weight_decay = {k: tree.dot(t, params[k]) for k, t in toward.items()}
        return SGDHyper(collect(hyper.lr, d_lr), collect(hyper.weight_decay, d_weight_decay)), toward

    def init_memory(self, params: Params) -> tuple[()]:
        return ()

    def credit(self, hyper: SGDHyper, memory: tuple[()], grads: Params) -> tuple[tuple[()], tuple[()]]:
        return (), ()

    def toward(
        self, hyper: SGDHyper, params: Params, opt: tuple[()], direction: Params, cotangent: Params
    ) -> Params:
        return self.toward_after(hyper, opt, cotangent)

    def toward_after(self, hyper: SGDHyper, opt: tuple[()], cotangent: Params) -> Params:
        """Return `toward` of `hyper` and `cotangent`, given as `opt` the state after the step."""
        gain = negative(hyper.lr)
        return {k: at(gain, k) * c for k, c in cotangent.items()}

    def _moves(self, hyper: SGDHyper, params: Params, direction: Params) -> Params:
        return {k: torch.addcmul(d, at(hyper.weight_decay, k), params[k]) for k, d in direction.items()}
