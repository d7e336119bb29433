"""Every example in a docstring runs and prints what it says, and every public class that computes has one.

Every argument of what is public stands in a docstring: as a line `name: …`, or in backticks in a sentence.
"""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Protocol

import pytest
import torch
from problems import every

import metafop
from metafop import preconditioners, protocols, tensorboard, types

MODULES = [importlib.import_module(info.name) for info in pkgutil.walk_packages(metafop.__path__, "metafop.")]
PUBLIC = {name: getattr(metafop, name) for name in metafop.__all__}
NAMES = PUBLIC | {"torch": torch, "metafop": metafop}
EXAMPLES = {
    example.name: example
    for module in MODULES
    for example in doctest.DocTestFinder().find(module, extraglobs=NAMES)
    if example.examples
}
PUBLIC_MODULES = [
    metafop,
    *filter(inspect.ismodule, PUBLIC.values()),
    preconditioners,
    protocols,
    tensorboard,
    types,
]


def public(module: ModuleType) -> list[type | Callable]:
    """Return the public classes and functions: those in `__all__` or, without one, those that it defines."""
    own = [k for k, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    names = getattr(module, "__all__", [k for k in own if k[0] != "_"])
    found = [getattr(module, name) for name in names]
    return [x for x in found if inspect.isclass(x) or inspect.isfunction(x)]


def methods(cls: type) -> dict[str, Callable]:
    """Return the public methods that metafop defines, and `__call__`. A function in a field is no method."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("metafop")]
    found = {k: x for base in bases for k, x in vars(base).items() if inspect.isfunction(x)}
    fields = getattr(cls, "__dataclass_fields__", {})
    return {k: x for k, x in found.items() if k not in fields and (k[0] != "_" or k == "__call__")}


def arguments(function: type | Callable) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name[0] != "_" and name != "self"]


def prose(x: type | Callable) -> str:
    """Return a docstring without its examples, and nothing for one that Python wrote."""
    text = inspect.cleandoc(x.__doc__ or "")
    parts = doctest.DocTestParser().parse("" if text.startswith(f"{x.__name__}(") else text)
    return "".join(part for part in parts if isinstance(part, str))


def named(x: type | Callable) -> set[str]:
    """Return the names before the colon of a line such as `low, high: the ends.`, and those in backticks.

    Where there are such lines, an argument without one is named in the first paragraph, not in passing.
    """
    text = prose(x)
    lines = re.findall(r"^(\w+(?:, \w+)*):(?:\s|$)", text, flags=re.MULTILINE)
    sentences = text.partition("\n\n")[0] if lines else text
    return set(re.findall(r"(?<![\w.])\w+", " ".join([*lines, *re.findall(r"`([^`]+)`", sentences)])))


def is_protocol(x: object) -> bool:
    return getattr(x, "_is_protocol", False) and x is not Protocol


def named_by_protocols(cls: type, method: str) -> set[str]:
    """Return the arguments that a method's docstring names in a protocol that the class follows."""
    known = {x: methods(x) for x in vars(protocols).values() if is_protocol(x)}
    followed = [each for each in known.values() if method in each and each.keys() <= set(dir(cls))]
    return {name for each in followed for name in named(each[method]) if name in arguments(each[method])}


def documented(x: type | Callable) -> Iterator[tuple[str, tuple[list[str], set[str]]]]:
    """Yield, for a function, or a class and each of its methods, its arguments and what docstrings name."""
    where = f"{x.__module__}.{x.__name__}"
    if not is_protocol(x):
        yield where, (arguments(x), named(x))
    if inspect.isclass(x):
        for name, method in methods(x).items():
            yield f"{where}.{name}", (arguments(method), named(method) | named_by_protocols(x, name))


DOCUMENTED = {name: each for module in PUBLIC_MODULES for x in public(module) for name, each in documented(x)}


@every("example", EXAMPLES)
def test_an_example_prints_what_it_says(example):
    said = []
    torch.set_default_dtype(torch.float32)
    with torch.random.fork_rng():
        outcome = doctest.DocTestRunner().run(example, out=said.append, clear_globs=False)
    assert outcome.failed == 0, "".join(said)


@pytest.mark.parametrize("name", [name for name, x in PUBLIC.items() if dataclasses.is_dataclass(x)])
def test_a_public_class_has_an_example(name):
    assert ">>>" in PUBLIC[name].__doc__


@every("arguments, explained", DOCUMENTED)
def test_a_docstring_names_every_argument(arguments, explained):
    assert [name for name in arguments if name not in explained] == []
