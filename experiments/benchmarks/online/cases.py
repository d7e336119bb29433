"""The steps that are compared on each network: plain ones, and those that learn preconditioners online."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from metafop import Adam, Momentum, Online, Training, assign, functional, hypergradients

Batch = tuple[Tensor, Tensor]


class Case(NamedTuple):
    """A method to take a step: `step(state, batch)`, and the state to start from."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    start: Any


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "unchecked": {"skip": ("carry",)},
    "closed": {"credit": "gradient", "guards": ()},
    "autograd": {"credit": "gradient", "guards": (), "hypergradient": hypergradients.by_autograd},
}
LR, DECAY = 1e-3, 0.01  # of AdamW, and of ours beside it


def over_momentum(model: nn.Module, generator: Generator) -> dict[str, Case]:
    """Return the plain step with momentum, and each variant that learns its preconditioners online."""
    loss, params, buffers = functional.from_module(model, batch_loss)
    hyper = Momentum().hyper(lr=0.01)
    plain, learned = Training(loss, Momentum()), Training(loss, Momentum(), assign(params))
    plain_meta, meta = (
        plain.init_meta(params, **hyper._asdict()),
        learned.init_meta(params, generator, **hyper._asdict()),
    )
    result = {
        "plain": Case(lambda state, batch: plain.step(plain_meta, state, batch), plain.init(params, buffers))
    }
    for name, settings in VARIANTS.items():
        online = Online(learned, Adam(), **settings)
        outer_meta = online.init_meta(meta, lr=1e-4)
        state = online.init(meta, learned.init(params, buffers))
        result[name] = Case(lambda state, batch, o=online, m=outer_meta: o.step(m, state, batch), state)
    return result


def over_adamw(model: nn.Module, generator: Generator) -> dict[str, Case]:
    """Return the step of an ordinary loop with torch.optim.AdamW, and ours with Adam as it learns online."""
    loss, params, buffers = functional.from_module(model, batch_loss)
    learned = Training(loss, Adam(), assign(params))
    meta = learned.init_meta(params, generator, lr=LR, weight_decay=DECAY)
    online = Online(learned, Adam())
    outer_meta = online.init_meta(meta, lr=1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)

    def plain(state: None, batch: Batch) -> tuple[None, None]:
        optimizer.zero_grad()
        batch_loss(model, batch).backward()
        optimizer.step()
        return None, None

    return {
        "adamw": Case(plain, None),
        "eager": Case(
            lambda state, batch: online.step(outer_meta, state, batch),
            online.init(meta, learned.init(params, buffers)),
        ),
    }


def batch_loss(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])
