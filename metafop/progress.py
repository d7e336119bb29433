"""How far long work is: whoever wants to know passes a function, such as a `Line`."""

import math
import sys
import time
from typing import TextIO


class Line:
    """One line on a terminal, written anew as work goes on, and gone in the end; elsewhere nothing.

    stream: where to write (sys.stderr).
    every: seconds between two writings, at least (0.1).

    >>> from metafop import progress
    >>> line = progress.Line()
    >>> for done in range(3):
    ...     line("forward", done + 1, 3)  # what, how much of it is done, of how much
    """

    def __init__(self, stream: TextIO | None = None, every: float = 0.1) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._every, self._last = every, -math.inf

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show `what` is being done, and how many steps of it are `done`, of how many in `total`."""
        now = time.monotonic()
        if not self._stream.isatty() or (now - self._last < self._every and done < total):
            return
        self._last = now
        filled = 20 * done // max(total, 1)
        line = f"[{'=' * filled}{' ' * (20 - filled)}] {done} of {total}, {what}" if done < total else ""
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
