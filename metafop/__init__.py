"""metafop learns how to train while it trains: a functional meta-optimizer library on torch.func."""

from torch.serialization import add_safe_globals

from metafop import (
    diagnostics,
    functional,
    hypergradients,
    meta_training,
    optim,
    optimizers,
    progress,
    randomness,
    safeguards,
    tree,
    verify,
)
from metafop.hypergradients import EvolutionCarry, ForwardCarry
from metafop.online import Online, OnlineCarry
from metafop.optimizers import (
    SGD,
    Adam,
    AdamHyper,
    AdamState,
    Momentum,
    MomentumHyper,
    ReversibleMomentum,
    ReversibleState,
    Scheduled,
    ScheduledState,
    SGDHyper,
)
from metafop.preconditioners import (
    Aging,
    Bounded,
    Dense,
    Diagonal,
    Identity,
    Kronecker,
    KroneckerFactors,
    LowRank,
    Normalized,
    Rescaled,
    Scalar,
    Spatial,
    assign,
)
from metafop.protocols import Inspectable, Optimizer, Preconditioner, Reversible
from metafop.tasks import Tasks
from metafop.training import Training
from metafop.types import Carry, Estimate, Given, Last, Meta, Seen
from metafop.unrolled import Unrolled, UnrolledState

__version__ = "0.1.0"

# What a state is made of: torch.load reads it without weights_only=False, which would run any code in a file.
_STATES = [Meta, Seen, Carry, Last, Given, Estimate, OnlineCarry, UnrolledState, ForwardCarry, EvolutionCarry]
_HYPERS = [SGDHyper, MomentumHyper, AdamHyper]
_PARTS = [AdamState, ReversibleState, ScheduledState, Aging, KroneckerFactors, optimizers.named_tuple]
add_safe_globals([*_STATES, *_HYPERS, *_PARTS])

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
    "Tasks",
    "Training",
    "Unrolled",
    "UnrolledState",
    "assign",
    "diagnostics",
    "functional",
    "hypergradients",
    "meta_training",
    "optim",
    "optimizers",
    "progress",
    "randomness",
    "safeguards",
    "tree",
    "verify",
]
