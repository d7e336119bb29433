"""Whether a compiled function gives the numbers of the function itself, but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

Leaves = list[Any]
Function = Callable[..., tuple[Leaves, ...]]


def check_agreement(compiled: Sequence[Leaves], function: Function, groups: Sequence[Leaves]) -> None:
    """Refuse what was compiled if it differs from `function(*groups)` by more than rounding does.

    Rounding may do √eps of a tensor and 10⁴ eps of all in its list; where that is passed, eps is that of the
    coarsest type that is computed in, as under autocast, and a hundred times as much is allowed as the
    function itself does if each number it is given is moved by eps: Adam's first step, for one, makes a sign
    of a gradient that is nothing but rounding.
    """
    plain = _numbers(function, groups)
    allowed = _allowed(plain)
    if _worst(compiled, plain, allowed) is None:
        return
    with Coarsest() as coarsest:
        again = _numbers(function, groups)
    if _worst(again, plain, allowed) is not None:
        raise ArithmeticError(
            "A step comes out different when it is taken again, as with random numbers (pass seeded=True to "
            "functional.from_module or functional.plain) or a counter in the loss. Make the loss a function "
            "of its arguments."
        )
    moved = _numbers(function, _moved(groups))
    allowed = [
        [limit + 100 * _gap(x, y) for limit, x, y in zip(*lists, strict=True)]
        for lists in zip(_allowed(plain, coarsest.eps), plain, moved, strict=True)
    ]
    if worst := _worst(compiled, plain, allowed):
        x, y = worst
        raise ArithmeticError(
            f"A compiled step gives {x:.6g} where the step itself gives {y:.6g}, by {abs(x - y):.3g} the "
            "largest difference: torch's compiler is wrong about an operation in the loss, or the loss reads "
            "what changes from call to call. Pass compile=False."
        )


class Coarsest(TorchFunctionMode):
    """A context that finds the eps of the coarsest floating-point type that is computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result


def _numbers(function: Function, groups: Iterable[Leaves]) -> list[Leaves]:
    """Return what the function returns, called as steps that are not compiled are."""
    with torch.enable_grad():
        returned = function(*map(list, groups))
    return [[x.detach() for x in group] for group in returned]


def _worst(
    compiled: Sequence[Leaves], plain: Sequence[Leaves], allowed: Sequence[Leaves]
) -> tuple[float, float] | None:
    """Return the two numbers that differ most, out of tensors that differ by more than is allowed."""
    found = [
        (_gap(x, y), x, y)
        for group in zip(compiled, plain, allowed, strict=True)
        for x, y, limit in zip(*group, strict=True)
        if not _gap(x, y) <= limit
    ]
    if not found:
        return None
    _, x, y = max(found, key=lambda each: each[0])
    place = (x.double() - y.double()).abs().nan_to_num(torch.inf).flatten().argmax()
    return float(x.flatten()[place]), float(y.flatten()[place])


def _gap(x: Tensor, y: Tensor) -> float:
    """Return the largest difference; that of what is not a number from the same is 0."""
    same = (x == y) | (x.isnan() & y.isnan())
    return (
        float(torch.where(same, 0.0, (x.double() - y.double()).abs().nan_to_num(torch.inf)).amax())
        if x.numel()
        else 0.0
    )


def _allowed(groups: Sequence[Leaves], least: float = 0.0) -> list[Leaves]:
    """Return what rounding may do to each tensor, its eps being `least` or more."""
    return [[_rounding(x, group, least) for x in group] for group in groups]


def _rounding(x: Tensor, group: Leaves, least: float) -> float:
    if not x.is_floating_point():
        return 0.0
    eps = max(torch.finfo(x.dtype).eps, least)
    return eps**0.5 * _size([x]) + min(1e4 * eps, 0.1) * _size(group)


def _size(group: Leaves) -> float:
    finite = (x.nan_to_num(0.0, 0.0, 0.0).abs().amax() for x in group if x.is_floating_point() and x.numel())
    return max(map(float, finite), default=0.0)


def _moved(groups: Sequence[Leaves]) -> Iterator[Leaves]:
    rng = Generator().manual_seed(0)

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x * (1 + torch.finfo(x.dtype).eps * torch.randn(x.shape, generator=rng).sign().to(x))

    return ([move(x) for x in group] for group in groups)
