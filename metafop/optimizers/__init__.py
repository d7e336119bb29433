"""Pure update rules: every hyperparameter is an argument, and can be learned."""

from metafop.optimizers.adam import Adam, AdamHyper, AdamState
from metafop.optimizers.completion import ByAutograd, completed
from metafop.optimizers.domains import Free, Positive, Unit
from metafop.optimizers.hyper import at, fitted, named_tuple
from metafop.optimizers.momentum import Momentum, MomentumHyper
from metafop.optimizers.reversible import ReversibleMomentum, ReversibleState
from metafop.optimizers.scheduled import Scheduled, ScheduledState
from metafop.optimizers.sgd import SGD, SGDHyper

__all__ = [
    "SGD",
    "Adam",
    "AdamHyper",
    "AdamState",
    "ByAutograd",
    "Free",
    "Momentum",
    "MomentumHyper",
    "Positive",
    "ReversibleMomentum",
    "ReversibleState",
    "SGDHyper",
    "Scheduled",
    "ScheduledState",
    "Unit",
    "at",
    "completed",
    "fitted",
    "named_tuple",
]
