"""On how many cores a process runs."""

import os
import sys


def stay_on(count: int) -> None:
    """Let this process, and the threads that it starts later, run on so many cores only.

    JAX starts a thread for each core that it may use, and has no setting for fewer: of its flags,
    `xla_cpu_multi_thread_eigen` and `intra_op_parallelism_threads` change nothing about it. So ours and JAX's
    get the same. Linux alone can do this.
    """
    if sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-count:])
