"""Processes that end with the one that began them. It imports little: such processes import it too."""

import multiprocessing
import os
from threading import Thread


def end_with_the_parent() -> None:
    """Let this process end as soon as the one that began it has, which may have been killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()
