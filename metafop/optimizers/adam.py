"""Adam, with decoupled weight decay."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metafop import tree
from metafop.optimizers.domains import Positive, Unit
from metafop.optimizers.hyper import Value, alike, at, collect, in_dtype, negative, shared, tensors
from metafop.protocols import Domains
from metafop.types import Params


class AdamHyper(NamedTuple):
    """The hyperparameters of `Adam`: `lr`, `betas`, `eps` and `weight_decay`.

    Each is a scalar or, by pattern of parameter names, a dict of these; `betas` are two.
    """

    lr: Tensor | dict[str, Tensor]
    betas: tuple[Tensor | dict[str, Tensor], Tensor | dict[str, Tensor]]
    eps: Tensor | dict[str, Tensor]
    weight_decay: Tensor | dict[str, Tensor]


class AdamState(NamedTuple):
    """After `time` steps, the moments m (`mean`) and v (`square`) of each parameter."""

    time: Tensor
    mean: Params
    square: Params


class _Numbers(NamedTuple):
    """What a step computes with for all parameters of the same betas and eps: c1 = 1 - β1ᵗ, c2 = 1 - β2ᵗ."""

    beta2: Tensor
    rest1: Tensor  # 1 - β1
    rest2: Tensor  # 1 - β2
    c1: Tensor
    c2: Tensor
    eps: Tensor


class _Parts(NamedTuple):
    """One parameter's update taken apart: m', v', m̂, √v̂, D = √v̂ + eps."""

    mean: Tensor
    square: Tensor
    ahead: Tensor
    root: Tensor
    denominator: Tensor


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba, 2015) with decoupled weight decay, as in `torch.optim.AdamW`.

    m' = β1 m + (1 - β1) d,    v' = β2 v + (1 - β2) d²,    m̂ = m' / (1 - β1ᵗ),    v̂ = v' / (1 - β2ᵗ)
    θ' = θ (1 - lr weight_decay) - lr m̂ / (√v̂ + eps)

    Its hyperparameters are `lr`, `betas` (0.9, 0.999), `eps` (1e-8) and `weight_decay` (0), each a number, or
    a dict by pattern of parameter names. Where v̂ is exactly zero the derivative of its root is taken as zero:
    it is infinite, and would turn the zero that it multiplies into NaN.

    >>> adam, params, direction = Adam(), {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 0.0])}
    >>> params, state = adam.update(adam.hyper(lr=0.1), params, adam.init(params), direction)
    >>> params["w"]
    tensor([-0.1000,  0.0000])
    """

    @property
    def domains(self) -> Domains:
        return {
            "lr": Positive(),
            "betas": (Unit(), Unit()),
            "eps": Positive(zero=False),
            "weight_decay": Positive(),
        }

    def hyper(
        self,
        lr: Value,
        betas: tuple[Value, Value] = (0.9, 0.999),
        eps: Value = 1e-8,
        weight_decay: Value = 0.0,
    ) -> AdamHyper:
        """Return the hyperparameters as tensors.

        lr: the learning rate, of zero or more.
        betas: β1 and β2, the factors by which the moments are kept, from 0 to below 1 ((0.9, 0.999)).
        eps: what is added to √v̂, above zero (1e-8).
        weight_decay: how much of θ is taken away, times lr, of zero or more (0).
        """
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return AdamHyper(*tensors(self, self.domains, values))

    def init(self, params: Params) -> AdamState:
        dtype = torch.promote_types(next(iter(params.values())).dtype, torch.float32)
        time = next(iter(params.values())).new_zeros((), dtype=dtype)
        return AdamState(time, tree.zeros_like(params), tree.zeros_like(params))

    def update(
        self, hyper: AdamHyper, params: Params, opt: AdamState, direction: Params
    ) -> tuple[Params, AdamState]:
        numbers = _numbers(hyper, opt.time + 1, params)
        parts = {k: _parts(numbers[k], opt.mean[k], opt.square[k], d) for k, d in direction.items()}
        kept = shared(lambda lr, weight_decay: 1 - lr * weight_decay, params, hyper.lr, hyper.weight_decay)
        new = {
            k: torch.addcmul(p * kept[k], at(hyper.lr, k), parts[k].ahead / parts[k].denominator, value=-1)
            for k, p in params.items()
        }
        mean = alike({k: part.mean for k, part in parts.items()}, opt.mean)
        square = alike({k: part.square for k, part in parts.items()}, opt.square)
        return alike(new, params), AdamState(opt.time + 1, mean, square)

    def pullback(
        self, hyper: AdamHyper, params: Params, opt: AdamState, direction: Params, cotangent: Params
    ) -> tuple[AdamHyper, Params]:
        """The chain rule through both moments (docs/math.md, 7)."""
        t = opt.time + 1
        numbers = _numbers(hyper, t, cotangent)
        powers = shared(lambda *betas: [beta ** (t - 1) for beta in betas], cotangent, *hyper.betas)
        gain = negative(hyper.lr)
        d_lr, d_beta1, d_beta2, d_eps, d_weight_decay, d_direction = {}, {}, {}, {}, {}, {}
        for k, c in cotangent.items():
            q, p, number, (power1, power2) = direction[k], params[k], numbers[k], powers[k]
            part = _parts(number, opt.mean[k], opt.square[k], q)
            d_ahead = at(gain, k) * c / part.denominator
            d_root = -d_ahead * part.ahead / part.denominator
            d_hat = d_root * _reciprocal(2 * part.root)
            d_lr[k] = -tree.dot(c, at(hyper.weight_decay, k) * p + part.ahead / part.denominator)
            d_beta1[k] = (
                tree.dot(d_ahead, opt.mean[k] - q) + tree.dot(d_ahead, part.ahead) * t * power1
            ) / number.c1
            d_beta2[k] = (
                tree.dot(d_hat, opt.square[k] - q * q) + tree.dot(d_hat, part.square) * t * power2 / number.c2
            ) / number.c2
            d_eps[k] = d_root.sum()
            d_weight_decay[k] = at(gain, k) * tree.dot(c, p)
            d_direction[k] = d_ahead * (number.rest1 / number.c1) + d_hat * q * (2 * number.rest2 / number.c2)
        d_hyper = AdamHyper(
            collect(hyper.lr, d_lr),
            (collect(hyper.betas[0], d_beta1), collect(hyper.betas[1], d_beta2)),
            collect(hyper.eps, d_eps),
            collect(hyper.weight_decay, d_weight_decay),
        )
        return d_hyper, d_direction

    def init_memory(self, params: Params) -> Params:
        return tree.zeros_like(params)

    def credit(self, hyper: AdamHyper, memory: Params, grads: Params) -> tuple[Params, Params]:
        """u' = β1 u + (1 - β1) g, credit u' / (1 - β1): the first moment's gradients (docs/math.md, 13)."""
        rest = shared(lambda beta1: 1 - beta1, memory, hyper.betas[0])
        memory = {k: torch.addcmul(u, rest[k], grads[k] - u) for k, u in memory.items()}
        return {k: u / rest[k] for k, u in memory.items()}, memory

    def toward(
        self, hyper: AdamHyper, params: Params, opt: AdamState, direction: Params, cotangent: Params
    ) -> Params:
        """-lr c (1 - β1) / ((1 - β1ᵗ) D): through the first moment, the second held (docs/math.md, 13)."""
        numbers = _numbers(hyper, opt.time + 1, cotangent)
        square = {k: _square(numbers[k], opt.square[k], _wide(direction[k])) for k in cotangent}
        return self.toward_after(hyper, AdamState(opt.time + 1, {}, square), cotangent)

    def toward_after(self, hyper: AdamHyper, opt: AdamState, cotangent: Params) -> Params:
        """Return `toward` of `hyper` and `cotangent`, given as `opt` the state after the step."""
        numbers, gain = _numbers(hyper, opt.time, cotangent), negative(hyper.lr)
        share = shared(lambda beta1: (1 - beta1) / (1 - beta1**opt.time), cotangent, hyper.betas[0])
        result = {}
        for k, c in cotangent.items():
            denominator = _root(opt.square[k] / numbers[k].c2) + numbers[k].eps
            result[k] = at(gain, k) * c / denominator * share[k]
        return result


def _numbers(hyper: AdamHyper, time: Tensor, names: Iterable[str]) -> dict[str, _Numbers]:
    """Return the numbers of the step that leads to `time`, for each name."""

    def made(beta1: Tensor, beta2: Tensor, eps: Tensor) -> _Numbers:
        return _Numbers(beta2, 1 - beta1, 1 - beta2, 1 - beta1**time, 1 - beta2**time, eps)

    return shared(made, names, *hyper.betas, hyper.eps)


def _parts(numbers: _Numbers, mean: Tensor, square: Tensor, d: Tensor) -> _Parts:
    d = _wide(d)
    mean = in_dtype(mean, d.dtype)
    mean = torch.addcmul(mean, numbers.rest1, d - mean)
    square = _square(numbers, square, d)
    root = _root(square / numbers.c2)
    return _Parts(mean, square, mean / numbers.c1, root, root + numbers.eps)


def _square(numbers: _Numbers, square: Tensor, d: Tensor) -> Tensor:
    return torch.addcmul(numbers.beta2 * in_dtype(square, d.dtype), numbers.rest2 * d, d)


def _wide(d: Tensor) -> Tensor:
    """Return it in float32 or more: in half precision eps would round to zero."""
    return in_dtype(d, torch.promote_types(d.dtype, torch.float32))


def _root(x: Tensor) -> Tensor:
    """√x, with derivative zero at zero."""
    if not (x.requires_grad or torch.compiler.is_compiling() or tree.is_transforming()):
        return x.sqrt()  # nobody takes it, and what is below takes six times as long
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def _reciprocal(x: Tensor) -> Tensor:
    """1/x, and zero at zero."""
    positive = x > 0
    return torch.where(positive, 1 / torch.where(positive, x, 1.0), 0.0)
