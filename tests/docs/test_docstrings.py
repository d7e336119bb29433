"""Every example in a docstring runs and prints what it says, and every public class that computes has one."""

import dataclasses
import doctest
import importlib
import pkgutil

import pytest
import torch
from problems import every

import metafop

MODULES = [importlib.import_module(info.name) for info in pkgutil.walk_packages(metafop.__path__, "metafop.")]
PUBLIC = {name: getattr(metafop, name) for name in metafop.__all__}
NAMES = PUBLIC | {"torch": torch, "metafop": metafop}
EXAMPLES = {
    example.name: example
    for module in MODULES
    for example in doctest.DocTestFinder().find(module, extraglobs=NAMES)
    if example.examples
}


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
