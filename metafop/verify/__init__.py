"""Is a hand-written pullback right? Closed form against autograd against finite differences, in float64.

For one's own preconditioner or update rule, one call:

    report = verify.check(preconditioner=MyFamily())
    print(report)             # every part of meta, its errors, and where the worst one sits
    assert report.ok

`python -m metafop.verify` checks every combination that the library has, and exits with 1 if one is wrong.
"""

from metafop.verify.estimators import check_estimator
from metafop.verify.hypergradients import check_hypergradient
from metafop.verify.library import built_in
from metafop.verify.problems import Problem, at_minimum, several_steps
from metafop.verify.report import Report, Row
from metafop.verify.rules import check

__all__ = [
    "Problem",
    "Report",
    "Row",
    "at_minimum",
    "built_in",
    "check",
    "check_estimator",
    "check_hypergradient",
    "several_steps",
]
