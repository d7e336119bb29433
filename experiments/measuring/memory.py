"""The peak memory of a computation: of its tensors, and of the whole process."""

import ctypes
import gc
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

WINDOW = 20  # batches after which the profiler's record so far is added up


def peak_of_tensors(function: Callable[[Sequence[Any]], Any], batches: Sequence[Any]) -> int:
    """Return the most bytes of tensors there are at once in `function(batches)`, above those before it."""
    recorded = _Recorded(batches)
    recorded.start()
    try:
        function(recorded)
    finally:
        recorded.stop()
    return recorded.peak


def peak_resident(function: Callable[[], Any]) -> int | None:
    """Return by how much the process grows at the most, in bytes, or None where Linux does not say.

    Memory that it has freed but kept is given back first: it would be used again without being counted.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    except (AttributeError, OSError):
        return None
    before = _most_resident()
    function()
    return _most_resident() - before


def _most_resident() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


class _Recorded(Sequence[Any]):
    """Batches which, as they are asked for, add up every allocation and every release of torch so far.

    Not all in the end: the profiler's record of a long unroll would take many gigabytes.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches, self.asked = batches, 0
        self.now = self.peak = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, t: Any) -> Any:
        self.asked += 1
        if self.asked % WINDOW == 0:
            gc.disable()  # a release while nothing is recorded would be missed
            self.stop()
            self.start()
            gc.enable()
        return self.batches[t]

    def start(self) -> None:
        self.recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.recording.start()

    def stop(self) -> None:
        self.recording.stop()
        record: Any = self.recording.profiler  # torch's stubs leave out `nbytes`
        events = record.kineto_results.events()
        changes = sorted(
            (e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]"
        )
        totals = list(accumulate((size for *_, size in changes), initial=self.now))
        self.now, self.peak = totals[-1], max(self.peak, *totals)
        self.recording.profiler = None  # a cycle keeps it, and gigabytes of records with it
