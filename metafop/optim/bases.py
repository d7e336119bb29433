"""What is known about an optimizer of torch: the pure one that describes it, and with it the derivative."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from metafop.optimizers import SGD, Adam, AdamHyper, AdamState, Momentum, MomentumHyper, SGDHyper

Known = SGD | Momentum | Adam
Group = Mapping[str, Any]

_SGD, _HEAVY_BALL, _NESTEROV, _ADAM = SGD(), Momentum(), Momentum(nesterov=True), Adam()


def described(optimizer_class: type, group: Group) -> Known | None:
    """Return the pure optimizer whose step a group of this class takes, or None if there is none.

    A subclass may do anything in its step, and is not known.
    """
    if optimizer_class is torch.optim.SGD:
        if not group["momentum"]:
            return _SGD
        if group["dampening"]:
            return None
        return _NESTEROV if group["nesterov"] else _HEAVY_BALL
    if optimizer_class in (torch.optim.Adam, torch.optim.AdamW) and not group["amsgrad"]:
        return _ADAM
    return None


def hyper(known: Known | None, group: Group, lr: float | Tensor | dict, dtype: torch.dtype) -> Any:
    """Return the group's settings as the pure optimizer's hyperparameters; an unknown one descends."""

    def tensor(value: float | Tensor | dict) -> Any:
        if isinstance(value, dict):
            return {key: tensor(x) for key, x in value.items()}
        if isinstance(value, Tensor):
            return value.detach().to(dtype).reshape(())
        return _number(value, dtype)

    if known is None:
        return SGDHyper(tensor(lr), tensor(0.0))
    decay = group["weight_decay"]
    if isinstance(known, SGD):
        return SGDHyper(tensor(lr), tensor(decay))
    if isinstance(known, Momentum):
        return MomentumHyper(tensor(lr), tensor(group["momentum"]), tensor(decay))
    beta1, beta2 = group["betas"]
    # Adam's weight decay is part of the direction (`direction` below), AdamW's is not.
    decoupled = decay if group["decoupled_weight_decay"] else 0.0
    return AdamHyper(tensor(lr), tensor(beta1), tensor(beta2), tensor(group["eps"]), tensor(decoupled))


@lru_cache(maxsize=64)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def held(known: Known | None, param: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what the base holds for a parameter; zeros before its first step."""

    def tensor(name: str) -> Tensor:
        value = state.get(name)
        return torch.zeros_like(param) if value is None else value

    if isinstance(known, Momentum):
        return {"velocity": tensor("momentum_buffer")}
    if isinstance(known, Adam):
        time = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32)  # a number, in states of old
        return {"time": time, "mean": tensor("exp_avg"), "square": tensor("exp_avg_sq")}
    return {}


def opt(known: Known | None, key: str, held: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """Return what is held for one parameter as the pure optimizer's state."""
    if isinstance(known, Momentum):
        return {key: held["velocity"].to(dtype)}
    if isinstance(known, Adam):
        mean, square = {key: held["mean"].to(dtype)}, {key: held["square"].to(dtype)}
        return AdamState(held["time"].to(dtype), mean, square)
    return ()


def direction(known: Known | None, group: Group, turned: Tensor, param: Tensor) -> Tensor:
    """Return P g as the pure optimizer sees it: signed, and with Adam's weight decay in it."""
    seen = signed(group, turned)
    if isinstance(known, Adam) and group["weight_decay"] and not group["decoupled_weight_decay"]:
        return seen.add(param, alpha=group["weight_decay"])
    return seen


def signed(group: Group, grad: Tensor) -> Tensor:
    """Return the gradient of what is minimized."""
    return -grad if group.get("maximize", False) else grad


def number(lr: float | Tensor) -> float | Tensor:
    """Return an lr as a number; on other devices it stays there."""
    return lr.reshape(()) if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr)


def is_zero(lr: float | Tensor) -> bool:
    """Return whether nothing will move. Where looking would wait for a device, it will."""
    if isinstance(lr, Tensor):
        return lr.device.type == "cpu" and not bool(lr.any())
    return lr == 0
