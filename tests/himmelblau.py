"""Descent on Himmelblau's function, for tests of the online learner."""

import torch

from metafop import SGD, Dense, Training, functional


def himmelblau(params, batch):
    x, y = params["x"]
    return (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2


def descent(start=(0.0, -1.0), lr=0.001, optimizer=None, hyper=None, family=None):
    """Return a training on Himmelblau's function with P = M Mᵀ, its meta and its carry."""
    optimizer = optimizer or SGD()
    training = Training(functional.plain(himmelblau), optimizer, {"x": family or Dense()})
    params = {"x": torch.tensor(start)}
    return (
        training,
        training.init_meta(params, **(hyper or optimizer.hyper(lr=lr))._asdict()),
        training.init(params),
    )


def states(online, hyper, meta, carry, batches):
    """Return the state after each step."""
    outer_meta, state = online.init_meta(meta, **hyper._asdict()), online.init(meta, carry)
    result = []
    for batch in batches:
        state, _ = online.step(outer_meta, state, batch)
        result.append(state)
    return result
