"""Writes what a person looks at to TensorBoard. The only file that imports tensorboard."""

import math
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from metafop import diagnostics
from metafop.protocols import Trains
from metafop.types import Meta, Params

try:
    from PIL import Image, ImageDraw
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore  # made at run time
    from torch.utils.tensorboard import FileWriter
    from torch.utils.tensorboard.summary import histogram, hparams, image, scalar
except ImportError as error:
    raise ImportError(
        'metafop.tensorboard needs tensorboard, which is not installed: pip install "metafop[tensorboard]".'
    ) from error

_LARGEST_HISTOGRAM = 1024  # rows of P: a million numbers
_LARGEST_IMAGE = 64
_PIXELS = 288  # the side of an image, at most: 32 for each number of a 9-by-9 P
_BINS = 64
_RED, _BLUE = (0.70, 0.09, 0.17), (0.13, 0.40, 0.67)


class Watched(Protocol):
    """An optimizer that shows what it has learned: `metafop.optim.FOP`."""

    def inspect(self) -> tuple[Trains, Meta, Params]:
        """Return a training with the preconditioners, a meta with their tensors, and the gradients."""
        ...

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Call `hook` after each step with the optimizer and the arguments of the step."""
        ...


class Logger:
    """Writes to one directory, which is one run in TensorBoard; close it, or use it in a `with`.

    directory: where to write; it is made if there is none.
    going_on_from: for a run that goes on after an interruption, the step that comes next: what an earlier
        part of it wrote of that step and of later ones is then not shown (None, a new run).

    >>> import tempfile
    >>> from metafop.tensorboard import Logger
    >>> loss = metafop.functional.plain(lambda params, batch: (params["w"] * batch).square().sum())
    >>> training, params = Training(loss, SGD(), {"w": Dense()}), {"w": torch.ones(2)}
    >>> meta, carry = training.init_meta(params, lr=0.01), training.init(params)
    >>> with tempfile.TemporaryDirectory() as directory, Logger(directory) as logger:
    ...     for step in range(10):
    ...         seen = training.evaluate(meta, carry, torch.tensor([1.0, 3.0]))
    ...         carry, info = training.advance(meta, carry, seen)
    ...         logger.info(step, info)
    ...     logger.diagnostics(step, training, meta, seen.grads)
    ...     logger.hyperparameters({"lr": 0.01, "family": Dense()}, {"loss": info["value"]})
    """

    def __init__(self, directory: str | Path, going_on_from: int | None = None) -> None:
        self._events = FileWriter(directory)
        if going_on_from is not None:
            self._events.add_event(Event(step=going_on_from, file_version="brain.Event:2"))
            start = SessionLog(status=SessionLog.START)
            self._events.add_event(Event(step=going_on_from, session_log=start))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush(self) -> None:
        """Write what still waits."""
        self._events.flush()

    def close(self) -> None:
        """Write what still waits; nothing can be written afterwards."""
        self._events.close()

    def info(self, step: int, info: Mapping[str, Any]) -> None:
        """Write every scalar of `info`: booleans as 0 and 1, NaN as NaN.

        Tensors of several numbers are left out. `step` is the number of the step.
        """
        for name, value in info.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                self._scalar(step, name, value)

    def diagnostics(self, step: int, training: Trains, meta: Meta, grads: Params) -> None:
        """Write `diagnostics.summary`, histograms "eigenvalues/…" and "P_values/…", and images "P/…".

        step: the number of the step.
        training: that whose preconditioners are looked at.
        meta: what was learned.
        grads: the gradient of each parameter, by name.

        The values of P if it has at most 1024 rows, its image if at most 64. Where some are not finite there
        is no histogram but a scalar "nonfinite/…": how many. The levels of a tower share names: use a Logger
        for each.
        """
        self.info(step, diagnostics.summary(training, meta, grads))
        spectra = diagnostics.eigenvalues(training, meta)
        for name, values in spectra.items():
            self._histogram(step, f"eigenvalues/{name}", values)
        small = [name for name, values in spectra.items() if values.numel() <= _LARGEST_HISTOGRAM]
        for name, p in diagnostics.matrices(training, meta, small).items():
            # Not "P/…": TensorBoard drops a name under which it finds two kinds of things.
            self._histogram(step, f"P_values/{name}", p)
            if p.shape[-1] <= _LARGEST_IMAGE:
                self._events.add_summary(image(f"P/{name}", picture(p), dataformats="CHW"), step)

    def learned(self, step: int, leaves: Mapping[str, Tensor]) -> None:
        """Write pictures of `leaves`, what was learned, by name: of a schedule "curve/…", of a matrix "M/…".

        A schedule has one if it has at most 1024 entries, a matrix if it has at most 64 rows and columns. Of
        all else that is more than a number there is a histogram, "values/…". `step` is the number of the
        step.
        """
        for name, leaf in leaves.items():
            if leaf.dim() == 1 and 1 < leaf.numel() <= _LARGEST_HISTOGRAM:
                self._events.add_summary(image(f"curve/{name}", curve(leaf), dataformats="HWC"), step)
            elif leaf.dim() == 2 and max(leaf.shape) <= _LARGEST_IMAGE:
                self._events.add_summary(image(f"M/{name}", picture(leaf), dataformats="CHW"), step)
            elif leaf.numel() > 1:
                self._histogram(step, f"values/{name}", leaf)

    def watch(self, optimizer: Watched, every: int = 100) -> RemovableHandle:
        """Write the diagnostics of an optimizer after its first step, and then after every so many.

        The step number is that of the optimizer since now. Call `remove()` of what is returned to stop.

        optimizer: a `metafop.optim.FOP`.
        every: how many steps lie between two writings, 1 or more (100).
        """
        if every < 1:
            raise ValueError(f"Logger.watch writes every so many steps, got every={every}. Pass 1 or more.")
        steps = count()

        def write(optimizer: Any, *_: object) -> None:
            step = next(steps)
            if step % every == 0:
                training, meta, grads = optimizer.inspect()
                if grads:
                    self.diagnostics(step, training, meta, grads)
                else:
                    self.info(step, diagnostics.hyper(meta))

        return optimizer.register_step_post_hook(write)

    def hyperparameters(self, settings: Mapping[str, Any], metrics: Mapping[str, float | Tensor]) -> None:
        """Write one row of the HParams tab, once, at the end of a run.

        settings: what was chosen, by name: finite numbers stay numbers, all else is written as Python prints
            it.
        metrics: what came of it, numbers by name: they are the scalars "hparam/…".
        """
        results = {f"hparam/{name}": _number(value) for name, value in metrics.items()}
        for summary in hparams({name: _setting(value) for name, value in settings.items()}, results):
            self._events.add_summary(summary)
        for name, value in results.items():
            self._events.add_summary(scalar(name, value))

    def _scalar(self, step: int, name: str, value: Tensor) -> None:
        self._events.add_summary(scalar(name, _number(value)), step)

    def _histogram(self, step: int, name: str, values: Tensor) -> None:
        nonfinite = (~torch.isfinite(values)).sum()
        if nonfinite > 0:
            self._scalar(step, f"nonfinite/{name}", nonfinite)
        else:
            values = values.detach().cpu().double()
            self._events.add_summary(histogram(name, values, _edges(values)), step)


def picture(p: Tensor) -> Tensor:
    """Return a matrix `p` as an image, (3, height, width): red above zero, white at it, blue below.

    What is not finite is black. A number x has a depth of √(|x| / max |p|), from 0 to 1, so that a hundredth
    of the largest is still seen.
    """
    p = p.detach().cpu().double()
    known = torch.isfinite(p)
    x = torch.where(known, p, 0.0)
    depth = (x.abs() / x.abs().amax().clamp(min=torch.finfo(x.dtype).tiny)).sqrt()
    colour = torch.where(x > 0, _column(_RED), _column(_BLUE))  # (3, n, n)
    painted = torch.where(known, 1 - depth * (1 - colour), 0.0)
    zoom = max(_PIXELS // p.shape[-1], 1)
    return painted.repeat_interleave(zoom, -1).repeat_interleave(zoom, -2)


def curve(values: Tensor) -> Tensor:
    """Return `values` over their index as an image, (height, width, 3), with numbers at its axes' ends."""
    x = values.detach().cpu().double()
    known = x[torch.isfinite(x)]
    low, high = (known.min().item(), known.max().item()) if len(known) else (0.0, 0.0)
    width, height, left, bottom, top = 480, 288, 72, 24, 12
    across, up = (width - left - 12) / max(len(x) - 1, 1), (height - bottom - top) / ((high - low) or 1.0)
    canvas = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(canvas)
    draw.line([(left, top), (left, height - bottom), (width - 12, height - bottom)], fill="grey")
    points = [(left + i * across, height - bottom - up * (v - low)) for i, v in enumerate(x.tolist())]
    draw.line([point for point, v in zip(points, x, strict=True) if v.isfinite()], fill="black", width=2)
    for value, place in ((high, top), (low, height - bottom)):
        draw.text((left - 6, place), f"{value:.3g}", fill="black", anchor="rm")
    for step, place in ((0, left), (len(x) - 1, width - 12)):
        draw.text((place, height - bottom + 6), str(step), fill="black", anchor="mt")
    return torch.tensor(list(canvas.tobytes()), dtype=torch.uint8).reshape(height, width, 3)


def _column(colour: tuple[float, float, float]) -> Tensor:
    return torch.tensor(colour, dtype=torch.float64).reshape(3, 1, 1)


def _edges(values: Tensor) -> list[float]:
    """Return the edges of equal bins, never so narrow that they round to nothing: P starts at I."""
    low, high = values.min().item(), values.max().item()
    margin = 1e-6 * max(abs(low), abs(high), 1e-6)
    return torch.linspace(low - margin, high + margin, _BINS + 1, dtype=torch.float64).tolist()


def _number(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _setting(value: Any) -> float | str:
    """Return what TensorBoard can show: it fails on a number that is not finite, and torch on most else."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if number else str(value)
