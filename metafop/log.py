"""What the library says while it works, by Python's logging: on stderr, unless a program sets it up."""

import logging


class _LastResort(logging.StreamHandler):
    """Writes what nobody else would: a program that has handlers of its own decides for itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


logger = logging.getLogger("metafop")
logger.setLevel(logging.INFO)
_last_resort = _LastResort()
_last_resort.setFormatter(logging.Formatter("metafop: %(message)s"))
logger.addHandler(_last_resort)
