"""Closed form against autograd against finite differences, for one optimizer and one preconditioner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from metafop import tree
from metafop.functional import plain
from metafop.hypergradients import by_autograd, closed_form
from metafop.optimizers import SGD
from metafop.preconditioners import Dense, clocks
from metafop.protocols import Optimizer, Preconditioner
from metafop.training import Training
from metafop.types import Given, Last, Meta, Params, Tree
from metafop.verify.report import AUTOGRAD_TOLERANCE, Report, Row, brief, place, relative

_DESCENT, _DENSE = SGD(), Dense()


def check(
    optimizer: Optimizer = _DESCENT,
    preconditioner: Preconditioner = _DENSE,
    shape: tuple[int, ...] = (4, 3),
    parts: tuple[str, ...] = ("hyper", "precond", "loss", "gradient"),
    seed: int = 0,
    **hyper: Any,
) -> Report:
    """Check a rule's closed form for the third step of a training, in every part of meta that `parts` names.

    The third step, because at the first some derivatives are exactly zero (Adam's in its betas). "loss" are
    leaves that the loss is given, "loss.weights" and "loss.l2": their derivative goes by way of the gradient,
    and through the rule's in that. "gradient" is the derivative of the step in the gradient that it is given,
    which estimates through many steps need: by autograd it must be that of differences, which it is not where
    a number is taken out of a tensor.

    optimizer: the one to check (`SGD()`).
    preconditioner: the family to check (`Dense()`, by which an optimizer's derivative in the direction
        shows).
    shape: that of the one parameter, which is named "w" ((4, 3)).
    parts: names of leaves of meta, or the starts of some, and "gradient" (all).
    seed: of the random problem (0).
    hyper: the optimizer's hyperparameters by name (its defaults; `lr=0.05` where no optimizer is given).

    >>> from metafop import verify
    >>> verify.check(preconditioner=Dense()).ok
    True
    """
    if optimizer is _DESCENT:
        hyper = {"lr": 0.05} | hyper
    what = f"{brief(optimizer)}, {brief(preconditioner)}, {'×'.join(str(n) for n in shape)}"
    training, meta, last, cotangent = _third_step(optimizer, hyper, preconditioner, shape, seed)
    later = meta._replace(loss=tree.scale(meta.loss, 1.1))  # as when an Online asks: they have moved
    closed = tree.named(closed_form(training, later, last, cotangent))
    if closed.keys() != tree.named(meta).keys():
        raise ValueError(
            f"The pullback of {optimizer} with {preconditioner} returns the leaves {sorted(closed)}, "
            f"but meta has {sorted(tree.named(meta))}. Return a tree like meta's."
        )
    autograd = tree.named(by_autograd(training, later, last, cotangent))
    sizes = _sizes(training, meta, last, cotangent)
    rows = []
    for name, value in tree.named(meta).items():
        if not name.startswith(parts) or name in clocks(meta.precond["w"], "precond.w"):
            continue
        if closed[name].shape != value.shape:
            raise ValueError(
                f"The pullback of {optimizer} with {preconditioner} returns {tuple(closed[name].shape)} for "
                f"{name}, of shape {tuple(value.shape)}. Return a tree of meta's shapes."
            )
        differences = _differences(partial(_paired, training, meta, last, cotangent, name), value)
        by_graph = relative(closed[name], autograd[name], sizes[name])
        rows.append(_row(what, name, by_graph, relative(closed[name], differences, sizes[name])))
    if "gradient" in parts:
        rows.append(_gradient_row(what, training, meta, last, cotangent))
    if not rows:
        raise ValueError(
            f"No part of meta starts with one of {parts}: there are {sorted(closed)}. Name some."
        )
    return Report(tuple(rows))


def _paired(training: Training, meta: Meta, last: Last, cotangent: Params, name: str, leaf: Tensor) -> Tensor:
    """Return ⟨cotangent, params after the last step⟩ with another leaf of this name."""
    moved, seen = tree.replace(meta, {name: leaf}), last.seen
    if last.given and name.startswith("loss."):
        seen = training.evaluate(moved, last.carry, last.given.batch)
    carry, _ = training.advance(moved, last.carry, seen)
    return tree.dot(cotangent["w"], carry.params["w"])


def _gradient_row(what: str, training: Training, meta: Meta, last: Last, cotangent: Params) -> Row:
    """Return how far autograd through the step, in the gradient, is from finite differences."""
    c, grad = cotangent["w"], last.seen.grads["w"]

    def moved(grad: Tensor) -> Tensor:
        carry, _ = training.advance(meta, last.carry, last.seen._replace(grads={"w": grad}))
        return carry.params["w"]

    by_graph = tree.pull(moved, grad, c)
    each = [x * tree.pull(moved, grad, one) for x, one in zip(c.flatten(), _units(c), strict=True)]
    size = torch.stack(each).abs().sum(0) + 1e-3 * tree.dot(
        c.abs(), (moved(grad) - last.carry.params["w"]).abs()
    )
    differences = _differences(lambda grad: tree.dot(c, moved(grad)), grad)
    error = relative(by_graph, differences, size)
    return _row(what, "gradient", torch.zeros_like(error), error)


def _row(what: str, name: str, by_graph: Tensor, by_steps: Tensor) -> Row:
    """Return the worst errors against autograd and against finite differences, and where the worst one is."""
    worst = by_graph if by_graph.max() > AUTOGRAD_TOLERANCE else by_steps
    compared = f"{by_steps.numel()} of {by_steps.numel()}"
    return Row(what, name, by_graph.max().item(), by_steps.max().item(), compared, place(name, worst))


def _third_step(
    optimizer: Optimizer, hyper: dict[str, Any], family: Preconditioner, shape: tuple[int, ...], seed: int
) -> tuple[Training, Meta, Last, Params]:
    """Return a training, a meta away from where it starts, its third step, and the gradient after it."""
    generator = Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=torch.float64, generator=generator)

    params = {"w": noise(torch.empty(shape))}
    curvature, target = noise(params["w"]).exp(), noise(params["w"])

    def loss(params: Params, shift: Tensor, leaves: Tree) -> Tensor:
        w = params["w"]
        errors = leaves["weights"].exp() * curvature * (1 + (w - target + shift) ** 2).sqrt()
        return errors.sum() + leaves["l2"].square() * w.square().sum()

    training = Training(plain(loss), optimizer, {"w": family})
    leaves = {"weights": noise(torch.empty(shape[-1:])), "l2": 0.3}
    meta = training.init_meta(params, generator, loss=leaves, **hyper)
    meta = meta._replace(precond=tree.map(lambda m: m + 0.3 * noise(m), meta.precond))
    carry = training.init(params)
    last = Last(carry, training.evaluate(meta, carry, torch.zeros(())), ())
    for shift in torch.linspace(-0.5, 0.5, 3, dtype=torch.float64):
        last = Last(carry, training.evaluate(meta, carry, shift), (), Given(meta.loss, shift))
        carry, _ = training.advance(meta, carry, last.seen)
    return training, meta, last, training.evaluate(meta, carry, torch.zeros(())).grads


def _sizes(training: Training, meta: Meta, last: Last, cotangent: Params) -> dict[str, Tensor]:
    """Return the size of the terms of the derivative in each number x of meta, as `Row` has it."""
    c = cotangent["w"]
    moved = training.advance(meta, last.carry, last.seen)[0].params["w"] - last.carry.params["w"]
    least = 1e-3 * tree.dot(c.abs(), moved.abs())
    total = {name: torch.full_like(leaf, least.item()) for name, leaf in tree.named(meta).items()}
    for x, one in zip(c.flatten(), _units(c), strict=True):
        row = tree.named(by_autograd(training, meta, last, {"w": one}))
        total = {name: size + x.abs() * row[name].abs() for name, size in total.items()}
    return total


def _units(like: Tensor) -> list[Tensor]:
    """Return a tensor for each number of `like`: one there, zero elsewhere."""
    return list(torch.eye(like.numel(), dtype=like.dtype).reshape(-1, *like.shape))


def _differences(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the derivative of `value` by central differences of fourth order."""
    derivatives = []
    for x, one in zip(at.flatten(), _units(at), strict=True):
        step = 1e-5 * max(1.0, x.abs().item())
        near = value(at + step * one) - value(at - step * one)
        far = value(at + 2 * step * one) - value(at - 2 * step * one)
        derivatives.append((8 * near - far) / (12 * step))
    return torch.stack(derivatives).view_as(at)
