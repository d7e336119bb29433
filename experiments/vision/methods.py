"""The optimizers that are compared, each with the name and the colour that it has in every experiment."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pytorch_optimizer import Muon  # torch's own takes no kernels
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from metafop.optim import FOP
from metafop.preconditioners import LowRank
from metafop.protocols import Preconditioner

Name = Literal[
    "momentum",
    "s-hd",
    "pp-hd",
    "fop-norm",
    "fop-paper",
    "fop-paper-5e-4",
    "fop",
    "adam",
    "adam-fop",
    "muon",
]
ADAMW_OVER_MUON = 0.05  # Muon takes matrices; what else there is takes AdamW, at this share of its lr


@dataclass(frozen=True)
class Method:
    """An optimizer and its settings: those of the paper, or of its own default, where they are None."""

    name: Name
    lr: float
    momentum: float = 0.9  # not of Adam
    meta_lr: float | None = None  # learning rate of M
    rank: int | None = None  # of M, for every matrix; if None, kernels are preconditioned by position

    def optimizer(self, model: nn.Module, seed: int) -> Optimizer:
        """Return it for the parameters of a model; what starts at random starts from the seed."""
        return METHODS[self.name].optimizer(self, model, seed)


class MethodInfo(NamedTuple):
    """The label and the colour of a method in tables and figures, and what makes its optimizer."""

    label: str
    colour: str
    optimizer: Callable[[Method, nn.Module, int], Optimizer]


def fop(base: type[Optimizer] = SGD, **settings: Any) -> Callable[[Method, nn.Module, int], Optimizer]:
    """Return what makes FOP around a base; `settings` are overruled by those of the method."""

    def make(method: Method, model: nn.Module, seed: int) -> Optimizer:
        own: dict[str, Any] = {} if method.meta_lr is None else {"meta_lr": method.meta_lr}
        if method.rank is not None:
            own["preconditioner"] = low_rank(model, method.rank)
        if base is SGD:
            own["momentum"] = method.momentum
        return FOP(model, base, seed=seed, lr=method.lr, **(settings | own))

    return make


def low_rank(model: nn.Module, rank: int) -> dict[str, Preconditioner]:
    """Return P = I + M Mᵀ over the inputs of each linear layer, with at most as many columns as inputs."""
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return {f"{name}.weight": LowRank(min(rank, layer.in_features)) for name, layer in linear.items()}


def muon(method: Method, model: nn.Module, seed: int) -> Optimizer:
    params = list(model.parameters())
    hidden = [p for p in params[1:] if p.dim() > 1 and p is not _last(model)]
    rest = [p for p in params if all(p is not other for other in hidden)]
    return Muon(
        [
            {"params": hidden, "lr": method.lr, "use_muon": True},
            {"params": rest, "lr": ADAMW_OVER_MUON * method.lr, "use_muon": False},
        ]
    )


def _last(model: nn.Module) -> nn.Parameter:
    """Return the weights of the last layer, the classifier: Muon leaves them out."""
    return [p for p in model.parameters() if p.dim() > 1][-1]


METHODS: dict[str, MethodInfo] = {
    "momentum": MethodInfo(
        "momentum", "black", lambda m, model, _: SGD(model.parameters(), lr=m.lr, momentum=m.momentum)
    ),
    "s-hd": MethodInfo("S-HD", "C4", fop(preset="paper", preconditioner="s-hd")),
    "pp-hd": MethodInfo("PP-HD", "C5", fop(preset="paper", preconditioner="pp-hd")),
    "fop-norm": MethodInfo("FOP-norm", "C8", fop(preset="paper", preconditioner="fop-norm")),
    "fop-paper": MethodInfo("FOP, printed rule", "C1", fop(preset="paper")),
    "fop-paper-5e-4": MethodInfo("FOP, printed rule at 5e-4", "C3", fop(preset="paper", meta_lr=5e-4)),
    "fop": MethodInfo("FOP", "C0", fop()),
    "adam": MethodInfo("Adam", "C7", lambda m, model, _: Adam(model.parameters(), lr=m.lr)),
    "adam-fop": MethodInfo("Adam with FOP", "C9", fop(Adam)),
    "muon": MethodInfo("Muon", "C2", muon),
}
