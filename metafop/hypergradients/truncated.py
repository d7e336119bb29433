"""Truncated windows: a long training cut into short unrolls, the optimizer's state carried over."""

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from metafop import tree
from metafop.hypergradients.adjoint import adjoint
from metafop.hypergradients.validation import batch_at, check_estimator, check_learnable, horizon
from metafop.protocols import Batches, Estimator, Trains
from metafop.types import Batch, Estimate, Meta, OuterLoss


@dataclass(frozen=True)
class Truncated:
    """The mean over windows of `steps` steps of the outer loss after each, and its derivative in meta with
    the carry that each window starts from held: what happened before it is not differentiated. Its derivative
    in `carry`, where the first one starts, is that of the first one's part of the mean.

    It takes the memory of one window, and cannot explode over many; it is biased toward what pays soon
    (docs/math.md, 21). To learn between windows, call `estimator` itself window by window: the carry that it
    returns starts the next.

    steps: how many a window has, 1 or more; the last one is shorter if the batches say so.
    estimator: any of `metafop.hypergradients`, for each window (`adjoint`).

    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] - batch).square().sum())
    >>> training, params = Training(loss, SGD()), {"w": torch.zeros(1)}
    >>> meta, carry = training.init_meta(params, lr=0.25), training.init(params)
    >>> batches, outer_loss = 4 * [torch.ones(1)], lambda carry: carry.params["w"].sum()
    >>> estimate = Truncated(steps=2)(training, outer_loss, meta, carry, batches)
    >>> estimate.value, estimate.grads.hyper.lr
    (tensor(0.8438), tensor(1.2500))
    """

    steps: int
    estimator: Estimator = adjoint

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(
                f"Truncated takes a whole number of steps, 1 or more, got steps={self.steps!r}. Pass one."
            )
        check_estimator("Truncated", self.estimator)

    def check_learnable(self, names: tuple[str, ...]) -> None:
        """Refuse to learn leaves of these `names` if `estimator` gives no derivative in one."""
        check_learnable(self.estimator, names)

    def __call__(
        self, training: Trains, outer_loss: OuterLoss, meta: Meta, carry: Any, batches: Batches
    ) -> Estimate:
        total = horizon(training, meta, carry, batches)
        windows: list[Estimate] = []
        for start in range(0, total, self.steps):
            window = _Window(batches, start, min(self.steps, total - start))
            windows.append(self.estimator(training, outer_loss, meta, carry, window))
            carry = windows[-1].carry
        values = torch.stack([window.value for window in windows])
        grads = tree.map(lambda *xs: torch.stack(xs).mean(0), *[window.grads for window in windows])
        info = {"values": torch.cat([window.info["values"] for window in windows]), "windows": values}
        start = tree.map(lambda x: (x / len(windows)).to(x.dtype), windows[0].start)
        return Estimate(values.mean(), grads, start, carry, info | self._overflow(windows))

    def _overflow(self, windows: list[Estimate]) -> dict[str, Any]:
        """Return the notes of all windows, each once, and the first step of all that overflowed."""
        if not tree.is_known(windows[0].value):
            return {"notes": ()}
        first, notes = -1, {}
        for start, window in zip(count(step=self.steps), windows, strict=False):
            step = int(window.info["overflow"])
            first = start + step if first < 0 <= step else first
            where = f"In the window from step {start} on: " if step >= 0 else ""
            notes |= dict.fromkeys(where + note for note in window.info["notes"])
        return {"overflow": torch.tensor(first), "notes": tuple(notes)}


@dataclass(frozen=True)
class _Window:
    """`steps` batches from `start`, each fetched when it is asked for."""

    batches: Batches
    start: int
    steps: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, t: int) -> Batch:
        return batch_at(self.batches, self.start + t)
