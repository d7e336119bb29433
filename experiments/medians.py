"""Medians over seeds, with bootstrap intervals, as in the paper's figure of a biped."""

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

RESAMPLES = 2000


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
