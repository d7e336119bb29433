"""The tables: how often each theorem fails, as printed and as corrected."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.paper.theory import theorem2
from experiments.paper.theory.counterexamples import Example
from experiments.paper.theory.problems import KINDS
from experiments.paper.theory.theorem1 import Descents
from experiments.paper.theory.theorem2 import RULES, Learned
from experiments.reporting.summary import Summary
from experiments.reporting.tables import show_table

CONVERGED = 1e-6  # of J at the start
NEAR = 0.01  # γ is near p∞


def theorem_1(out: Path, descents: dict[str, Descents], steps: int) -> Summary:
    """Print how often each claim fails, and return it."""
    figures: Summary = {"quadratics_of_each_kind": len(descents["definite"].usable)}
    columns: list[dict[str, str]] = []
    for kind, found in descents.items():
        everywhere, usable = torch.ones_like(found.usable), found.usable
        rises = ~usable & ~(found.values["printed"][-1] <= found.values["printed"][0])
        refused = int((~usable).sum())
        counts = {
            "printed: ρ ≤ 0": ("printed_no_step", refused, len(usable)),
            "printed, ρ ≤ 0: f rises along the run": ("printed_no_step_rises", int(rises.sum()), refused),
        }
        for claim, label, among, suffix in (
            ("printed", "printed, ρ > 0", usable, ""),
            ("proof", "proof's own, ρ > 0", usable, ""),
            ("proof", "proof's own, ρ ≤ 0", ~usable, "_no_step"),
            ("corrected", "corrected", everywhere, ""),
        ):
            for where, fails in found.fails(claim, among).items():
                words = "from the worst start" if where == "worst" else f"along {steps} steps"
                key = f"{claim}{suffix}_fails_{where}"
                counts[f"{label}: fails {words}"] = (key, fails, int(among.sum()))
        figures |= {f"theorem1_{kind}_{key}": count for key, count, _ in counts.values()}
        columns.append({label: f"{count} of {total}" for label, (_, count, total) in counts.items()})
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    title = "Theorem 1 on random quadratics: how often it fails"
    show_table(out, title, ["", *(KINDS[kind].label for kind in descents)], rows)
    return figures


def counterexamples(out: Path, examples: dict[str, Example]) -> Summary:
    columns = ["counter-example", "printed", "happens", "corrected", "happens then"]
    rows = [
        [e.statement, *(x if isinstance(x, str) else f"{x:.4g}" for x in e[1:])] for e in examples.values()
    ]
    show_table(out, "Counter-examples", columns, rows)
    return {
        f"example_{name}_{key}": value
        for name, example in examples.items()
        for key, value in example._asdict().items()
        if isinstance(value, float)
    }


def theorem_2(
    out: Path, learned: dict[str, dict[str, Learned]], meta_lrs: Sequence[float], limit: float, steps: int
) -> Summary:
    """Print how often the bounds on ‖P‖ are broken, and where γ and θ end."""
    figures: Summary = {}
    norms, ends = [], []
    for name, by_rule in learned.items():
        for rho in meta_lrs:
            words, key = f"{name.replace('_', ' ')}, ρ = {rho:g}", f"theorem2_{name}_rho{rho:g}"
            free = by_rule["plain"].at(rho)
            claimed = theorem2.bounds(free)
            over = (free.run.log_norm - claimed.printed).max().item() / math.log(10)
            broken = {
                f"{which}_bound_broken": _share((free.run.log_norm > bound + 1e-9).any(0))
                for which, bound in claimed._asdict().items()
            }
            norms.append([words, *(_percent(share) for share in broken.values()), _power(over)])
            found = {rule: ending(rule, runs.at(rho), limit) for rule, runs in by_rule.items()}
            ends += [[f"{words}, {RULES[rule].label}", *_cells(numbers)] for rule, numbers in found.items()]
            figures |= {f"{key}_{quantity}": share for quantity, share in broken.items()}
            figures[f"{key}_log10_norm_over_printed_bound"] = over
            figures[f"{key}_norm_over_printed_bound"] = 10**over if over < 300 else None
            figures |= {
                f"{key}_{rule}_{what}": x for rule, numbers in found.items() for what, x in numbers.items()
            }
    columns = ["J", "middle term broken", "printed broken", "corrected broken", "largest ‖P‖ / printed"]
    show_table(out, "Theorem 2: bounds on ‖P‖, learned by FOP without γ from M = I", columns, norms)
    columns = ["J, and what M is learned on from", f"γ within {100 * NEAR:g} % of p∞", "largest γ"]
    columns += [f"J ≤ {CONVERGED:g} J₀", "J > J₀", "median λmax/λmin", "corrected broken"]
    title = f"Theorem 2: ends of runs of {steps} steps, δ = 1/t², p∞ = {limit:g}, L = 1"
    show_table(out, title, columns, ends)
    return figures


def ending(rule: str, found: Learned, limit: float) -> Summary:
    """Return where the runs end; None is what is not there, or not finite."""
    seen = found.run
    gamma, spread = seen.gamma[-1], seen.spread[-1].median().item()
    largest = gamma.nan_to_num(torch.inf).max().item()
    return {
        "gamma_near": _share((gamma / limit - 1).abs() < NEAR) if rule != "plain" else None,
        "gamma_largest": largest if math.isfinite(largest) else None,
        "converged": _share(seen.value[-1] <= CONVERGED * seen.value[0]),
        "rose": _share(~(seen.value[-1] <= seen.value[0])),
        "spread": spread if math.isfinite(spread) else None,
        "corrected_broken": _share(theorem2.breaks_corrected(rule, found, limit)),
    }


def _cells(numbers: dict[str, Any]) -> list[str]:
    """Return them for a table: shares in percent, the others as they are."""
    cells = []
    for key, x in numbers.items():
        if key in ("gamma_largest", "spread"):
            cells.append("overflows" if x is None else f"{x:.3g}")
        else:
            cells.append("" if x is None else _percent(x))
    return cells


def _share(hits: Tensor) -> float:
    return hits.double().mean().item()


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _power(exponent: float) -> str:
    """Return 10 to this power, which may overflow."""
    return f"{10**exponent:.4g}" if exponent < 300 else f"1e{exponent:.0f}"
