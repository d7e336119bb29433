"""metafop learns how to train while it trains: a functional meta-optimizer library on torch.func."""

from metafop import diagnostics, functional, hypergradients, optim, randomness, safeguards, tree, verify
from metafop.online import Online, OnlineCarry
from metafop.optimizers import (
    SGD,
    Adam,
    AdamHyper,
    Momentum,
    MomentumHyper,
    ReversibleMomentum,
    Scheduled,
    SGDHyper,
)
from metafop.preconditioners import (
    Bounded,
    Dense,
    Diagonal,
    Identity,
    Kronecker,
    LowRank,
    Normalized,
    Rescaled,
    Scalar,
    Spatial,
    assign,
)
from metafop.training import Training
from metafop.types import (
    Carry,
    Estimate,
    Inspectable,
    Last,
    Meta,
    Optimizer,
    Preconditioner,
    Reversible,
    Seen,
)
from metafop.unrolled import Unrolled, UnrolledState

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamHyper",
    "Bounded",
    "Carry",
    "Dense",
    "Diagonal",
    "Estimate",
    "Identity",
    "Inspectable",
    "Kronecker",
    "Last",
    "LowRank",
    "Meta",
    "Momentum",
    "MomentumHyper",
    "Normalized",
    "Online",
    "OnlineCarry",
    "Optimizer",
    "Preconditioner",
    "Rescaled",
    "Reversible",
    "ReversibleMomentum",
    "SGDHyper",
    "Scalar",
    "Scheduled",
    "Seen",
    "Spatial",
    "Training",
    "Unrolled",
    "UnrolledState",
    "assign",
    "diagnostics",
    "functional",
    "hypergradients",
    "optim",
    "randomness",
    "safeguards",
    "tree",
    "verify",
]
