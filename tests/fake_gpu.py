"""A GPU without numbers: its tensors have shapes and types, and cannot be mixed with those of another device.

No hardware is needed. The device is "lazy", under torch's fake tensors: a fake "cuda" device has derivatives
only where torch is built with CUDA and finds a driver.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from problems import Problem
from torch import Tensor
from torch._subclasses import FakeTensorMode

from metafop import tree

GPU, META = torch.device("lazy"), torch.device("meta")
ON_A_DEVICE_WITHOUT_NUMBERS = pytest.mark.parametrize("device", [GPU, META], ids=["fake gpu", "meta"])
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class FakeGPU(FakeTensorMode):
    """A context in which tensors are fake. It refuses all others, and code that reads a number."""

    @property
    def avoid_device_init(self) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=False)

    def __deepcopy__(self, memo: Any) -> "FakeGPU":
        return self  # or copies of its tensors would be those of another


def mode(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which tensors can be on a device."""
    return FakeGPU() if device == GPU else nullcontext()


def like(x: Any, device: torch.device) -> Any:
    """Return tensors like those of a tree, on a device without numbers."""
    return tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device=device), x)


def moved_to(problem: Problem, device: torch.device) -> Problem:
    """Return a problem with all that training is given on a device without numbers."""
    params, buffers, batches = like((problem.params, problem.buffers, problem.batches), device)
    return replace(problem, params=params, buffers=buffers, batches=batches)


def devices(x: Any) -> set[torch.device]:
    """Return where the tensors of a tree are."""
    return {leaf.device for leaf in tree.leaves(x) if isinstance(leaf, Tensor)}
