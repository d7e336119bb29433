"""What was learned, in numbers, and whether to trust the hypergradients that it was learned from."""

from metafop.diagnostics.preconditioning import (
    angle,
    angles,
    directions,
    eigenvalues,
    hyper,
    matrices,
    norms,
    spectra,
    summary,
    weights,
    whitening,
)
from metafop.diagnostics.trust import halves, metasmoothness, variance

__all__ = [
    "angle",
    "angles",
    "directions",
    "eigenvalues",
    "halves",
    "hyper",
    "matrices",
    "metasmoothness",
    "norms",
    "spectra",
    "summary",
    "variance",
    "weights",
    "whitening",
]
