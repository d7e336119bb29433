"""The peak memory of a call, for tests of what it keeps."""

from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of_tensors(call):
    """Return the most bytes of tensors there are at once in `call()`, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    profiler: Any = record.profiler  # torch's stubs leave out `nbytes`
    events = profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    return max(accumulate(size for *_, size in changes))
