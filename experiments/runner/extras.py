"""The packages that a command needs, and the extras that install them."""

from collections.abc import Mapping
from importlib.util import find_spec


def require(command: str, extras: Mapping[str, str]) -> None:
    """Raise SystemExit if a package is not installed, of those that a command needs: each with its extra."""
    missing = [package for package in extras if find_spec(package) is None]
    if missing:
        *others, last = missing
        named = f"{', '.join(others)} and {last}" if others else last
        extra = ",".join(sorted({extras[package] for package in missing}))
        raise SystemExit(
            f"{command} needs {named}, which {'are' if others else 'is'} not installed: "
            f'pip install "metafop[{extra}]".'
        )
