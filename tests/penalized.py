"""A small training with two leaves of its loss, of which tests make what is to be refused."""

from typing import Any

import torch

from metafop import SGD, Training, functional
from metafop.hypergradients import adjoint

params = {"w": torch.ones(3, dtype=torch.float64)}
leaves = {"weights": torch.ones(3, dtype=torch.float64), "l2": 0.1}


def penalized(params, batch, leaves):
    return (leaves["weights"] * (params["w"] - 2).square()).sum() + leaves["l2"] * params["w"].square().sum()


def training(loss=penalized, optimizer=None, **settings):
    return Training(functional.plain(loss), optimizer or SGD(), **settings)


def meta(given: Any = leaves, of: Any = None):
    return (of or training()).init_meta(params, loss=given, lr=0.1)


def estimate(
    estimator: Any = adjoint,
    loss: Any = penalized,
    given: Any = leaves,
    outer: Any = None,
    carry: Any = None,
    batches: Any = None,
):
    """An estimate of which one thing is another than it should be."""
    own = training(loss)
    start, end = carry or own.init(params), outer or (lambda carry: carry.params["w"].sum())
    return estimator(own, end, meta(given, own), start, batches or 3 * [torch.ones(3)])
