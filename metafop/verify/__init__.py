"""Is a derivative right? Against autograd and finite differences, in float64, by one call for each kind.

    verify.check(preconditioner=MyFamily())                     of one step, for a rule or a preconditioner
    verify.check_estimator(MyEstimator())                       of several steps, in meta and in the start
    verify.check_hypergradient(hypergradient, run, {"lr": .1})  of a training that any library computes

Each returns a report; printed, it has a row for each part, with its errors and where the worst one sits.

    assert report.ok, report

`python -m metafop.verify` checks all that the library has, and exits with 1 if something is wrong.
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
