"""What is known about torch's optimizers: the pure optimizer that describes one, and so the derivative."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from metafop.optimizers import SGD, Adam, AdamHyper, AdamState, Momentum, MomentumHyper, SGDHyper

Pure = SGD | Momentum | Adam
Group = Mapping[str, Any]

# What they keep for each parameter that is of its shape.
LIKE_PARAM = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
}

_SGD, _HEAVY_BALL, _NESTEROV, _ADAM = SGD(), Momentum(), Momentum(nesterov=True), Adam()


def described(optimizer_class: type, group: Group) -> Pure | None:
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


def hyper(pure: Pure | None, settings: Group, lr: float | Tensor | dict, dtype: torch.dtype) -> Any:
    """Return a group's settings as hyperparameters of the pure optimizer; without one, of gradient descent.

    `lr` is one for all parameters, or a dict by parameter.
    """

    def tensor(value: float | Tensor | dict) -> Any:
        if isinstance(value, dict):
            return {key: tensor(x) for key, x in value.items()}
        return scalar(value.reshape(()) if isinstance(value, Tensor) else value, dtype)

    if pure is None:
        return SGDHyper(tensor(lr), tensor(0.0))
    decay = settings["weight_decay"]
    if isinstance(pure, SGD):
        return SGDHyper(tensor(lr), tensor(decay))
    if isinstance(pure, Momentum):
        return MomentumHyper(tensor(lr), tensor(settings["momentum"]), tensor(decay))
    beta1, beta2 = settings["betas"]
    # Adam's weight decay is part of the direction (`effective_direction` below), AdamW's is not.
    decoupled = decay if settings["decoupled_weight_decay"] else 0.0
    return AdamHyper(tensor(lr), (tensor(beta1), tensor(beta2)), tensor(settings["eps"]), tensor(decoupled))


def hyper_of_credit(pure: Pure | None, settings: Group, dtype: torch.dtype) -> Any:
    """Return what `pure.credit` reads of the hyperparameters, and no others: it is called at every step."""
    if isinstance(pure, Adam):
        return SimpleNamespace(betas=(scalar(settings["betas"][0], dtype),))
    return SimpleNamespace(momentum=scalar(settings["momentum"], dtype))


def scalar(value: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return a setting as a tensor; of a number on the CPU, whatever `torch.device` is the default."""
    if isinstance(value, Tensor):
        return value.detach().to(dtype)
    return torch.scalar_tensor(value, dtype=dtype, device="cpu")


def moments(pure: Pure | None, param: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the base's state of a parameter, in the pure optimizer's words; zeros before its first step."""

    def tensor(name: str) -> Tensor:
        value = state.get(name)
        return torch.zeros_like(param) if value is None else value

    if isinstance(pure, Momentum):
        return {"velocity": tensor("momentum_buffer")}
    if isinstance(pure, Adam):
        time = scalar(state.get("step", 0.0), torch.float32)  # a number in old states
        return {"time": time, "mean": tensor("exp_avg"), "square": tensor("exp_avg_sq")}
    return {}


def moment_names(pure: Pure | None) -> tuple[str, ...]:
    """Return the names under which `moments` returns them."""
    if isinstance(pure, Momentum):
        return ("velocity",)
    return ("time", "mean", "square") if isinstance(pure, Adam) else ()


def pure_state(pure: Pure | None, key: str, moments: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """Return the moments of one parameter as the pure optimizer's state."""
    if isinstance(pure, Momentum):
        return {key: moments["velocity"].to(dtype)}
    if isinstance(pure, Adam):
        mean, square = {key: moments["mean"].to(dtype)}, {key: moments["square"].to(dtype)}
        return AdamState(moments["time"].to(dtype), mean, square)
    return ()


def effective_direction(pure: Pure | None, group: Group, direction: Tensor, param: Tensor) -> Tensor:
    """Return P g as the pure optimizer takes it: of what is minimized, and with Adam's weight decay in it."""
    minimized = to_minimize(group, direction)
    if isinstance(pure, Adam) and group["weight_decay"] and not group["decoupled_weight_decay"]:
        return minimized.add(param, alpha=group["weight_decay"])
    return minimized


def to_minimize(group: Group, grad: Tensor) -> Tensor:
    """Return the gradient of what is minimized."""
    return -grad if group.get("maximize", False) else grad


def is_zero(setting: float | Tensor) -> bool:
    """Return whether a setting is zero; of a tensor that is not to be read, False."""
    if isinstance(setting, Tensor):
        return is_readable(setting) and not bool(setting.any())
    return setting == 0


def is_readable(x: Tensor) -> bool:
    """Return whether its value is there to be read: on another device that takes long, others have none."""
    return x.is_cpu and type(x) in (Tensor, nn.Parameter)  # a FakeTensor says that it is on the CPU, too


def at_least_float32(x: Tensor) -> Tensor:
    """Return a tensor of half precision in float32, any other as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
