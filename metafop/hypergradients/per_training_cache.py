"""Results found once for a training and kept as long as it lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch.utils.weak import WeakIdKeyDictionary

from metafop.protocols import Trains

R = TypeVar("R")


class PerTraining(Generic[R]):
    """The function `find(training, key, *args)`, called once for each training and key.

    A training is known by its identity, and neither it nor its data are kept alive: what `find` is given is a
    weak proxy of it, and its results go when it goes.
    """

    def __init__(self, find: Callable[..., R]) -> None:
        self.find = find
        self.found: Any = WeakIdKeyDictionary()

    def __call__(self, training: Trains, key: Any, *args: Any) -> R:
        try:
            results = self.found.setdefault(training, {})
        except TypeError:  # one of a class with slots cannot be known when it is gone: found each time
            return self.find(training, key, *args)
        if key not in results:
            results[key] = self.find(weakref.proxy(training), key, *args)
        return results[key]
