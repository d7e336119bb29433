"""What the settings of an experiment may be: numbers above zero, unless their type says otherwise."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

T = TypeVar("T")


class Limit(NamedTuple):
    """What a setting may be besides a number above zero, or one value or more."""

    least: float | None = None  # number
    empty: bool = False  # whether it may have no value


FromZero = Annotated[T, Limit(least=0)]
AnySign = Annotated[T, Limit(least=-math.inf)]
MayBeEmpty = Annotated[T, Limit(empty=True)]


def refusals(config: Any, prefix: str = "--") -> Iterator[str]:
    """Yield what is wrong with each setting, named as a flag, and what to pass in its place."""
    hints = get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        flag, value = prefix + field.name.replace("_", "-"), getattr(config, field.name)
        if is_dataclass(value):
            yield from refusals(value, f"{flag}.")
        else:
            yield from _refused(
                flag, value if isinstance(value, tuple) else (value,), _limits(hints[field.name])
            )


def _limits(hint: Any) -> list[Limit]:
    """Return the limits in a type, and in that of its items."""
    found = [x for part in (hint, *get_args(hint)) for x in getattr(part, "__metadata__", ())]
    return [x for x in found if isinstance(x, Limit)]


def _refused(flag: str, values: tuple[Any, ...], limits: list[Limit]) -> Iterator[str]:
    if not values and not any(limit.empty for limit in limits):
        yield f"{flag} takes one value or more, got none. Name some, or leave the flag out."
    for name in {x: None for x in values if isinstance(x, str) and values.count(x) > 1}:
        yield f"{flag} takes each value once, got {name} more often. Name it once."
    least = next((limit.least for limit in limits if limit.least is not None), None)
    for x in values:
        if isinstance(x, bool) or not isinstance(x, int | float):
            continue
        if least is None and not x > 0:
            allowed = "1 or more" if isinstance(x, int) else "numbers above 0"
            yield f"{flag} takes {allowed}, got {x}. Pass a larger number."
        elif least is not None and not x >= least:
            yield f"{flag} takes {least:g} or more, got {x}. Pass a larger number."
