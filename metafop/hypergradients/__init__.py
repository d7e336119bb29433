"""Derivatives of training in what steers it."""

from metafop.hypergradients.one_step import one_step

__all__ = ["one_step"]
