"""Derivatives of training in what steers it."""

from metafop.hypergradients.one_step import by_autograd, closed_form

__all__ = ["by_autograd", "closed_form"]
