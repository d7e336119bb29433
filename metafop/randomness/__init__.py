"""Randomness as data: torch's random functions as pure functions of a seed."""

from metafop.randomness.mode import seeded
from metafop.randomness.numbers import next_seed

__all__ = ["next_seed", "seeded"]
