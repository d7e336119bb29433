"""A function called in a process of its own: in which nothing was held before, or nothing imported."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

from experiments.runner.processes import end_with_the_parent


def isolated(preload: Sequence[str], function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, called in a process forked from one that has only imported `preload`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return _called(context.Process, function, *args)


def fresh(variables: Mapping[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, called in a new interpreter with these environment variables besides.

    It has imported what the module of the function imports, and nothing else.
    """
    with patch.dict(os.environ, variables):
        return _called(multiprocessing.get_context("spawn").Process, function, *args)


def _called(start: Callable[..., BaseProcess], function: Callable[..., Any], *args: Any) -> Any:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = start(target=_answer, args=(theirs, function, *args))
    process.start()
    theirs.close()  # so that we see when the process is gone
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"A process that was to measure ended with exit code {process.exitcode}; that of one that is "
            "killed, as when memory is short, is -9. Pass smaller sizes."
        ) from None
    finally:
        process.terminate()  # if this one is interrupted
        process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _answer(connection: Connection, function: Callable[..., Any], *args: Any) -> None:
    end_with_the_parent()
    try:
        answer = function(*args)
    except Exception as error:
        error.add_note(traceback.format_exc())  # which would be lost on the way
        answer = error
    connection.send(answer)
