"""Names by pattern of the shell: `*` stands for any characters. The first pattern that fits a name counts."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch


@torch.compiler.assume_constant_result  # torch.compile does not follow fnmatch
def first(patterns: tuple[str, ...], name: str) -> str | None:
    """Return the first pattern that fits the name, or None.

    >>> from metafop import patterns
    >>> patterns.first(("encoder.*", "*"), "head.weight")
    '*'
    """
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def unused(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that are the first for no name: slips, most likely."""
    patterns = tuple(patterns)
    used = {first(patterns, name) for name in names}
    return [pattern for pattern in patterns if pattern not in used]
