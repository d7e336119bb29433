"""Families of preconditioning matrices: what is learned about each parameter's gradient."""

from metafop.preconditioners.dense import Dense, Spatial
from metafop.preconditioners.elementwise import Diagonal, Identity, Scalar
from metafop.preconditioners.kronecker import Kronecker, KroneckerFactors
from metafop.preconditioners.layers import assign, by_layer, by_rule, by_shape, check_rules
from metafop.preconditioners.low_rank import LowRank
from metafop.preconditioners.scaled import Aging, Bounded, Normalized, Rescaled, aged, clocks

__all__ = [
    "Aging",
    "Bounded",
    "Dense",
    "Diagonal",
    "Identity",
    "Kronecker",
    "KroneckerFactors",
    "LowRank",
    "Normalized",
    "Rescaled",
    "Scalar",
    "Spatial",
    "aged",
    "assign",
    "by_layer",
    "by_rule",
    "by_shape",
    "check_rules",
    "clocks",
]
