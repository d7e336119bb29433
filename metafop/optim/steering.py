"""Learned learning rate and momentum: by what a group's own settings are moved, whatever a scheduler sets."""

from typing import Any

import torch
from torch import Tensor

from metafop import tree
from metafop.optim import bases
from metafop.optim.moves import Leaf, Mover
from metafop.optim.plans import PREFIX
from metafop.optim.work import Item, Work, wide
from metafop.optimizers import Positive, Unit
from metafop.safeguards import over

_DOMAINS = {"lr": Positive(), "momentum": Unit()}
_FIELDS = {"lr": "lr", "momentum": "decay"}  # what the pure optimizers call them


def steer(mover: Mover, work: Work) -> None:
    """Learn from the last step, and set what the base is to step with: x(z(x) + offset) (docs/math.md, 9)."""
    names = work.learned
    for item in work.items:
        item.find()
    for name in names:
        if _offset(name) not in work.group:
            offset = torch.zeros_like(wide(work.items[0].param).flatten()[0])
            work.pending |= {_offset(name): offset, f"{PREFIX}{name}_updates": 0}
            work.pending |= {f"{PREFIX}{name}_{j}": x for j, x in enumerate(mover.init(offset))}
    taken = [item for item in work.items if item.own("steered")]
    _set(work, names)
    if taken and work.moves:
        _learn(mover, work, names, taken)
        if work.group["order"] == "exact":
            _set(work, names)
    for item in work.items:
        item.keep("steered", int(work.moves))
        item.keep("before", item.param.clone())
        for name, x in bases.held(work.known, item.param, item.state).items():
            item.keep(f"held_{name}", x.clone())
    work.pending |= {f"{PREFIX}{name}_used": value for name, value in work.steered.items()}
    work.pending[f"{PREFIX}lr_used"] = work.lr.clone() if isinstance(work.lr, Tensor) else work.lr


def hold(work: Work) -> None:
    """Keep the directions that are about to be taken."""
    for item in work.items:
        taken = item.grad if item.turned is None else item.turned
        item.keep("direction", wide(bases.direction(work.known, work.group, taken, item.param)).clone())


def _set(work: Work, names: list[str]) -> None:
    now = {**work.group, **work.pending}
    for name in names:
        value, offset = now[name], now[_offset(name)]
        if bases.is_zero(value):
            work.steered[name] = value
            continue
        moved = _DOMAINS[name].moved(
            torch.as_tensor(value, dtype=offset.dtype), torch.zeros_like(offset), offset
        )
        work.steered[name] = moved.to(value.dtype) if isinstance(value, Tensor) else moved.item()


def _learn(mover: Mover, work: Work, names: list[str], taken: list[Item]) -> None:
    """Move the offsets by the derivative of the last step in log lr and logit momentum."""
    cotangents = work.signed(taken)
    dtype = next(iter(cotangents.values())).dtype
    hyper = work.last_hyper(work.group[f"{PREFIX}lr_used"], dtype)
    derivatives = [_derivative(work, item, hyper, cotangents[item.key]) for item in taken]
    size = None
    if work.group["scale_free"]:
        moved = [wide(item.param) - wide(item.own("before")) for item in taken]
        size = tree.norm(cotangents) * tree.norm(moved)
    leaves, grads = [], []
    for name in names:
        value = getattr(hyper, _FIELDS[name])
        h = _DOMAINS[name].chain(value, torch.stack([getattr(d, _FIELDS[name]) for d in derivatives]).sum())
        opt = [work.group[f"{PREFIX}{name}_{j}"] for j in range(mover.states)]
        leaves.append(Leaf(work.group[_offset(name)], opt, work.group[f"{PREFIX}{name}_updates"]))
        grads.append(h if size is None else over(h, size))
    mover.move(work.group["meta_lr"], leaves, grads, work.undo)
    work.pending |= {f"{PREFIX}{name}_updates": leaf.age for name, leaf in zip(names, leaves, strict=True)}


def _derivative(work: Work, item: Item, hyper: Any, cotangent: Tensor) -> Any:
    """Return ∂⟨∇J, θ⟩ in the hyperparameters of the last step, for one parameter."""
    held = {name: item.own(f"held_{name}") for name in bases.held(work.known, item.param, item.state)}
    k, before = item.key, wide(item.own("before"))
    opt = bases.opt(work.known, item.key, held, cotangent.dtype)
    return work.known.pullback(hyper, {k: before}, opt, {k: item.own("direction")}, {k: cotangent})[0]  # pyright: ignore


def _offset(name: str) -> str:
    return f"{PREFIX}{name}_offset"
