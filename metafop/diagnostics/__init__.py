"""What was learned, in numbers, and whether to trust the hypergradients that it was learned from."""

from metafop.diagnostics.preconditioning import (
    angle,
    angles,
    directions,
    eigenvalues,
    hyper,
    leaves,
    matrices,
    norms,
    spectra,
    summary,
    weights,
    whitening,
)
from metafop.diagnostics.trust import halves, metasmoothness, variance
from metafop.diagnostics.trust_tests import (
    AtMinimum,
    Estimated,
    GrowsSlowly,
    HalvesAgree,
    Metasmooth,
    Solved,
    TrustTest,
    Verdict,
)

__all__ = [
    "AtMinimum",
    "Estimated",
    "GrowsSlowly",
    "HalvesAgree",
    "Metasmooth",
    "Solved",
    "TrustTest",
    "Verdict",
    "angle",
    "angles",
    "directions",
    "eigenvalues",
    "halves",
    "hyper",
    "leaves",
    "matrices",
    "metasmoothness",
    "norms",
    "spectra",
    "summary",
    "variance",
    "weights",
    "whitening",
]
