"""`python -m metafop.verify`: is every closed form and every estimator of the library right?"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from metafop.verify.library import built_in
from metafop.verify.report import AUTOGRAD_TOLERANCE, DIFFERENCES_TOLERANCE, Report


def main(arguments: list[str] | None = None) -> int:
    """Print the table of `built_in`; return 0 if all of it is right, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m metafop.verify", description="Check every closed form and every estimator."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE as well")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}. Make it first.")
    start = time.perf_counter()
    report = Report(tuple(row for part in built_in() for row in part.rows))
    seconds = time.perf_counter() - start
    print(report)
    autograd = max(row.autograd or 0.0 for row in report.rows)
    differences = max(row.differences for row in report.rows)
    print(f"\n{sum(row.ok for row in report.rows)} of {len(report.rows)} right, in {seconds:.0f} s.")
    print(f"Worst error: {autograd:.1e} from autograd, where {AUTOGRAD_TOLERANCE:.0e} is allowed,")
    print(f"and {differences:.1e} from finite differences, where {DIFFERENCES_TOLERANCE:.0e} is allowed.")
    if not report.ok:
        print(f"The worst is {report.worst.worst_at} of {report.worst.what}.")
    if options.json:
        rows = [asdict(row) | {"ok": row.ok} for row in report.rows]
        options.json.write_text(json.dumps({"ok": report.ok, "seconds": seconds, "rows": rows}, indent=2))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
