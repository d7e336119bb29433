"""What is taken again must come out the same: a step, on the way back or between kept carries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from metafop import tree


def check_repeated(t: int, first: Sequence[Tensor], again: Sequence[Tensor], atol: float = 0.0) -> None:
    """Refuse a step that sees another loss when it is taken again, or another gradient, where they are given.

    Both lists begin with the loss; bit for bit if `atol` is 0, and NaN is the same as NaN.
    """
    for x, y in zip(map(tree.unwrapped, first), map(tree.unwrapped, again), strict=False):
        if not tree.is_concrete(x):
            continue
        if torch.equal(x, y) or torch.allclose(x, y, rtol=0.0, atol=atol, equal_nan=True):
            continue
        what = "loss" if x is tree.unwrapped(first[0]) else "gradient"
        raise ArithmeticError(
            f"The {what} of step {t} comes out different when the step is taken again, by "
            f"{(x - y).abs().max():.3g}, so that no derivative of it would be right. Likely causes are "
            "random numbers (pass seeded=True to functional.from_module or functional.plain), a module whose "
            "mode changed, batches that augment in __getitem__, or a counter in forward. Make the loss a "
            "function of its arguments, and batches[t] the same whenever it is asked."
        )


@dataclass
class FirstStep:
    """The first step, which is taken again `after` a later one, to see whether it is the same."""

    forward: Callable[[], tuple[Any, list[Tensor], Any]]  # its carry, what it sees, what else it returns
    after: int
    seen: list[Tensor] = field(default_factory=list)

    def look(self, t: int, seen: list[Tensor]) -> None:
        """Look at step t, which saw this."""
        if t == 0:
            self.seen = seen
        if t == self.after:
            check_repeated(0, self.seen, self.forward()[1])
            self.seen = []


def repeats_after(steps: int) -> int:
    """Return the step after which the first is taken again, where no other is.

    As late as can be, and an odd number of steps after the first: what alternates is seen too.
    """
    return steps - 2 + steps % 2


def rounding(values: Sequence[Tensor]) -> list[float]:
    """Return by how much each loss may differ between kernels that compute it.

    √eps of the loss itself and, where it is nearly zero as a difference of larger numbers, 100 eps of these:
    of the largest loss, or 1 if that is larger.
    """
    sizes = tree.unwrapped(torch.stack(list(values)).detach()).abs().double().nan_to_num(0.0, 0.0)
    if not tree.is_concrete(sizes):
        return len(values) * [0.0]
    eps = torch.finfo(values[0].dtype).eps
    slack = eps**0.5 * sizes + 100 * eps * sizes.amax().clamp(max=1)
    return slack.reshape(len(values), -1).amax(1).tolist()
