"""Learned preconditioning for ordinary training loops: a `torch.optim.Optimizer` around any other."""

from metafop.optim.fop import FOP

__all__ = ["FOP"]
