"""Derivatives of training in meta: of the last step, or of many."""

from metafop.hypergradients.adjoint import Adjoint, adjoint
from metafop.hypergradients.autograd import Autograd, autograd
from metafop.hypergradients.evolution import Evolution, EvolutionCarry, evolution
from metafop.hypergradients.forward import Forward, ForwardCarry, forward
from metafop.hypergradients.implicit import Implicit, implicit
from metafop.hypergradients.linear_solvers import ConjugateGradients, Neumann
from metafop.hypergradients.one_step import by_autograd, closed_form
from metafop.hypergradients.reversible import ReversibleAdjoint, reversible
from metafop.hypergradients.truncated import Truncated

__all__ = [
    "Adjoint",
    "Autograd",
    "ConjugateGradients",
    "Evolution",
    "EvolutionCarry",
    "Forward",
    "ForwardCarry",
    "Implicit",
    "Neumann",
    "ReversibleAdjoint",
    "Truncated",
    "adjoint",
    "autograd",
    "by_autograd",
    "closed_form",
    "evolution",
    "forward",
    "implicit",
    "reversible",
]
