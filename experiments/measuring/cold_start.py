"""A start in which torch's compiler has built nothing before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from unittest.mock import patch


@contextmanager
def cold_start() -> Iterator[None]:
    """Give torch's compiler an empty cache, and silence its profiler."""
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder, KINETO_LOG_LEVEL="99"),
    ):
        yield
