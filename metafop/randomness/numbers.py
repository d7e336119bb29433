"""Random numbers as data: a pure function of the seed, the number of the call, and the index of the element.

    seed           the run's seed in its low 32 bits, the number of the step in its high 32 bits
    key(c)       = mix(mix(mix(run ^ c) ^ step) ^ call)
    bits[index]  = mix(mix(index ^ key(A)) ^ key(B))              32 bits, in an int64

These are ordinary operations on integers, whose products stay below 2⁶³: they give the same bits under vmap,
in compiled code, on every device and in every process.
"""

from __future__ import annotations  # torch.compile does not follow annotations of inner functions

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_STEP = 2**32
_LOW = 2**32 - 1
_A, _B = 0x243F6A88, 0x85A308D3


def next_seed(seed: Tensor) -> Tensor:
    """Return the seed of the step after that of `seed`, in the same run."""
    return seed + _STEP


class Numbers:
    """The random numbers of one step, call after call: the next call is all that this object remembers.

    Uniform numbers have 32 random bits, or as many as the type has digits (24 in float32); a normal number
    comes from 32 bits by the inverse of the error function, so that none is larger than 6.4.
    """

    def __init__(self, seed: Tensor) -> None:
        run, step = seed & _LOW, (seed >> 32) & _LOW
        self.seed = seed
        self.keys = [mix(mix(run ^ c) ^ step) for c in (_A, _B)]
        self.calls = 0

    def bits(self, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
        """Return integers from 0 to 2³² - 1, those of the next call."""
        index = torch.arange(math.prod(shape), device=device).reshape(tuple(shape))
        first, second = [mix(key ^ self.calls).to(index.device) for key in self.keys]
        self.calls += 1
        return mix(mix(index ^ first) ^ second)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Return numbers in [0, 1): the leading digits of the bits."""
        _refuse_complex(dtype)
        digits = min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))
        return (self.bits(shape, device) >> (32 - digits)).to(dtype) * 2.0**-digits

    def inside(self, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
        """Return numbers in (0, 1), neither end included: (bits + 1/2) / 2³², in float64."""
        return (self.bits(shape, device).double() + 0.5) * 2.0**-32

    def normal(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        _refuse_complex(dtype)
        return (math.sqrt(2) * torch.erfinv(2 * self.inside(shape, device) - 1)).to(dtype)

    def exponential(self, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
        return -self.inside(shape, device).log()

    def kept(self, shape: Sequence[int], p: float, device: torch.device | None = None) -> Tensor:
        """Return where dropout keeps a number: where bits >= p 2³²."""
        return self.bits(shape, device) >= int(p * 2**32)


def _refuse_complex(dtype: torch.dtype) -> None:
    if dtype.is_complex:
        raise ValueError(
            f"A seeded loss draws real numbers, got {dtype}. Draw both parts, and join them by torch.complex."
        )


def mix(x: Tensor) -> Tensor:
    """Return a hash of 32-bit numbers, by two rounds of x := c (x + ⌊x / 2ᵏ⌋) mod 2³².

    The sum is written as a product, because torch's compiler repeats what is read twice: all of a hash that
    is made of x ^ (x >> k) is then repeated 2ⁿ times for n of these, and takes minutes to build.
    """
    x = (x * (2**16 + 1) >> 16) * 0x21F0AAAD & _LOW
    x = (x * (2**15 + 1) >> 15) * 0x735A2D97 & _LOW
    return (x >> 15) ^ x
