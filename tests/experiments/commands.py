"""Commands of experiments, run in this process."""

import json

from experiments.__main__ import main


def smoke(name, out, *flags):
    """Run the smoke preset of a command; return its summary and its tables."""
    main([name, "--preset", "smoke", "--out", str(out), *flags])
    return json.loads((out / "summary.json").read_text()), (out / "tables.md").read_text()
