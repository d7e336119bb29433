"""Batches of images that are read by other processes, which end with the run that they read for.

Those processes import this file, so it imports little.
"""

import multiprocessing
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from experiments.data.image_folder import Folder
from experiments.runner.processes import end_with_the_parent


def loader(
    images: Folder, batches: Iterable[list[tuple[int, int]]], processes: int, lasting: bool
) -> DataLoader[Any]:
    """Return what gives the batches each time that it is gone through; with no processes, it reads itself.

    Processes that last are there for the next time: to begin one takes as long as to tell it every path.
    """
    # Forked from a run, with its threads, a process may hang. Forked from one that has only imported this
    # file, it cannot, and is begun as fast.
    multiprocessing.set_forkserver_preload([__name__])
    return DataLoader(
        images,
        batch_sampler=batches,
        num_workers=processes,
        multiprocessing_context="forkserver" if processes else None,
        persistent_workers=lasting and processes > 0,
        worker_init_fn=end_with_the_run,
        pin_memory=torch.cuda.is_available(),
    )


def end_with_the_run(_: int) -> None:
    end_with_the_parent()
