"""Ctrl-C: the process that was started ends, with all that it has begun, and says what is saved."""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from threading import Thread, Timer, main_thread
from typing import Any, NamedTuple
from unittest.mock import patch

EXIT_CODE = 130  # that of a shell, for SIGINT
SHOW_CURSOR = b"\x1b[?25h"  # which progress bars hide
NOTHING = "Nothing is saved: the same command starts again."


class Kept(NamedTuple):
    """What an interrupted command leaves, in words: they hold if one of the files is in its folder."""

    words: str = NOTHING  # in which {out} is the folder
    files: tuple[str, ...] = ()  # as patterns; if there are none, the words always hold

    def said(self, config: Any) -> str:
        """Return the line with which an interrupted command ends."""
        hold = not self.files or any(found for pattern in self.files for found in config.out.glob(pattern))
        return f"Interrupted. {self.words if hold else NOTHING}".format(**vars(config))


def is_behind(error: BaseException | None) -> bool:
    """Return whether an error is an interruption, or was raised on the way out after one."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or is_behind(error.__context__))


def run(command: Callable[[], None]) -> None:
    """Run a command; if it is interrupted, print the interruption's message in place of a traceback."""
    _listen()
    try:
        command()
    except KeyboardInterrupt as interruption:
        print(str(interruption) or "Interrupted before it began.", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)  # what libraries do at an ordinary end can fail where they were interrupted


def _listen() -> None:
    """Let Ctrl-C interrupt this thread, but none of the processes begun from here on, which it also reaches.

    They inherit what is blocked, from their first instruction to their last. So SIGINT is blocked, here too;
    a thread that waits for it interrupts this one by another signal.
    """
    if sys.platform == "win32" or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # as in the background of a script, where Ctrl-C is ignored
    with patch.dict(os.environ, PYTHONWARNINGS="ignore"):  # it removes what ended processes leave, silently
        resource_tracker.ensure_running()  # begun later, it would unblock SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    sys.unraisablehook = _interrupt_again
    Thread(target=_wait, daemon=True).start()


def _wait() -> None:
    """Interrupt the main thread at the first Ctrl-C, and end the process at the second, whatever it does."""
    signal.sigwait({signal.SIGINT})
    _interrupt()
    signal.sigwait({signal.SIGINT})
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), SHOW_CURSOR)
    os.write(sys.stderr.fileno(), b"\nInterrupted again: ended at once.\n")
    os._exit(EXIT_CODE)


def _interrupt() -> None:
    signal.pthread_kill(main_thread().ident or 0, signal.SIGUSR1)


def _interrupt_again(unraisable: Any) -> None:
    """Interrupt a moment later, if it came in a `__del__` or its like, which no exception leaves."""
    if unraisable.exc_type is KeyboardInterrupt:
        Timer(0.1, _interrupt).start()
    else:
        sys.__unraisablehook__(unraisable)
