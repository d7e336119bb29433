"""Statistics over seeds: means of pairs with intervals, p-values, medians, steps to a target loss."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

RESAMPLES = 2000  # of a bootstrap


class Interval(NamedTuple):
    """A mean over seeds and its 95 % t-interval; None where a value is not finite, or there is one seed."""

    mean: float | None
    low: float | None
    high: float | None


def interval(values: Tensor) -> Interval:
    if not values.isfinite().all():
        return Interval(None, None, None)
    mean, n = values.mean().item(), len(values)
    if n < 2:
        return Interval(mean, None, None)
    half = float(stats.t.ppf(0.975, n - 1)) * values.std().item() / n**0.5
    return Interval(mean, mean - half, mean + half)


def geometric(ratios: Tensor) -> Interval:
    """Return the geometric mean of ratios and its interval."""
    return Interval(*(None if x is None else math.exp(x) for x in interval(ratios.log())))


def p_value(differences: Tensor) -> float | None:
    """Return the two-sided p-value of Student's t-test that the mean difference is zero."""
    if len(differences) < 2 or not differences.isfinite().all() or differences.std() == 0:
        return None
    found: Any = stats.ttest_1samp(differences.numpy(), 0.0)
    return float(found.pvalue)


def smoothed(losses: Tensor, steps: int) -> Tensor:
    """Return the mean over the last `steps`, from the first at which there are as many."""
    return losses.unfold(-1, steps, 1).mean(-1)


def steps_to(losses: Tensor, target: float, steps: int) -> float:
    """Return after how many steps the mean loss of the last `steps` is first at the target; NaN if never."""
    if len(losses) < steps:
        return math.nan
    there = smoothed(losses, steps) <= target
    return int(there.nonzero()[0]) + steps if there.any() else math.nan


def gathered(runs: list[Tensor]) -> Tensor:
    """Return runs as rows; one that ended early, because it diverged, is filled up with NaN."""
    length = max(len(run) for run in runs)
    return torch.stack([torch.nn.functional.pad(run, (0, length - len(run)), value=math.nan) for run in runs])


class Median(NamedTuple):
    """A median over seeds, and the ends of its 95 % bootstrap interval: of few seeds, their range."""

    middle: Tensor
    low: Tensor
    high: Tensor


def median(values: Tensor) -> Median:
    """Return the median of values (seeds, …)."""
    middle = values.quantile(0.5, 0)
    if len(values) < 2 or not values.isfinite().all():
        return Median(middle, middle, middle)
    drawn: Any = stats.bootstrap(
        (values.numpy(),),
        np.median,
        n_resamples=RESAMPLES,
        batch=100,
        vectorized=True,
        axis=0,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = (torch.as_tensor(end) for end in drawn.confidence_interval)
    return Median(middle, low, high)
