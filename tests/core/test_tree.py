"""Trees of tensors: arithmetic, and leaves by name."""

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from problems import every
from torch._subclasses import FakeTensorMode
from torch.func import vmap

from metafop import tree


class Pair(NamedTuple):
    left: object
    right: object


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


TREES = {
    "tensor": numbers(1.0, 2.0),
    "empty tuple": (),
    "empty dict": {},
    "dict": {"b": numbers(1.0), "a": numbers(2.0, 3.0)},
    "dotted keys": {"conv1.weight": numbers(1.0), "conv1.bias": numbers(2.0)},
    "nested": Pair({"lr": numbers(1.0)}, Pair((numbers(2.0), ()), {"a.b": Pair(numbers(3.0), {})})),
    "list": [numbers(1.0), [numbers(2.0)], (numbers(3.0),)],
    "no numbers": {"a": torch.zeros(0, 3)},
}


def test_arithmetic_goes_leaf_by_leaf():
    x, y = {"a": numbers(1.0, 2.0), "b": (numbers(3.0),)}, {"a": numbers(10.0, 20.0), "b": (numbers(30.0),)}
    torch.testing.assert_close(tree.add(x, y), {"a": numbers(11.0, 22.0), "b": (numbers(33.0),)})
    torch.testing.assert_close(tree.scale(x, 2.0), {"a": numbers(2.0, 4.0), "b": (numbers(6.0),)})
    torch.testing.assert_close(tree.zeros_like(x), {"a": numbers(0.0, 0.0), "b": (numbers(0.0),)})


def test_dicts_are_added_by_name_whatever_their_order():
    total = tree.add({"a": numbers(1.0), "b": numbers(2.0)}, {"b": numbers(20.0), "a": numbers(10.0)})
    torch.testing.assert_close(total, {"a": numbers(11.0), "b": numbers(22.0)})


def test_trees_of_different_names_do_not_add():
    with pytest.raises(ValueError, match="b"):
        tree.add({"a": numbers(1.0)}, {"b": numbers(1.0)})


def test_dot_and_norm_are_those_of_the_flattened_tree(generator):
    x, y = torch.randn(2, 3, 4, generator=generator)
    torch.testing.assert_close(tree.dot(x, y), (x * y).sum())
    flat = torch.cat([x.flatten(), y.flatten()])
    torch.testing.assert_close(tree.norm({"x": x, "inside": (y,)}), flat.norm())


@every("x", TREES)
def test_names_are_as_many_and_in_the_order_of_leaves(x):
    torch.testing.assert_close(list(tree.named(x).values()), tree.leaves(x))


def test_names_are_dotted():
    names = ["left.lr", "right.left.0", "right.right.a.b.left"]
    assert list(tree.named(TREES["nested"])) == names
    assert list(tree.named(TREES["dotted keys"], "precond")) == ["precond.conv1.weight", "precond.conv1.bias"]
    assert list(tree.named(TREES["list"])) == ["0", "1.0", "2.0"]


@every("x", TREES)
def test_replacing_all_leaves_by_name_gives_the_tree_of_new_leaves(x):
    replaced = tree.replace(x, {name: leaf + 1 for name, leaf in tree.named(x).items()})
    torch.testing.assert_close(replaced, tree.map(lambda leaf: leaf + 1, x))
    assert type(replaced) is type(x)


def test_replacing_leaves_keeps_the_kind_of_every_dict():
    x = {"a": OrderedDict(c=numbers(1.0), b=numbers(2.0))}
    replaced = tree.replace(x, {"a.b": numbers(3.0)})
    assert type(replaced["a"]) is OrderedDict
    torch.testing.assert_close(replaced, {"a": OrderedDict(c=numbers(1.0), b=numbers(3.0))})


def test_replacing_one_leaf_leaves_the_others_as_they_are():
    x = TREES["nested"]
    replaced = tree.named(tree.replace(x, {"right.left.0": numbers(7.0)}))
    expected = tree.named(x) | {"right.left.0": numbers(7.0)}
    torch.testing.assert_close(replaced, expected)
    assert replaced["left.lr"] is tree.named(x)["left.lr"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(bad, dtype):
    good = {"a": torch.full((4,), 6e4, dtype=dtype), "b": (torch.zeros(2, 2), torch.zeros(0))}
    assert tree.all_finite(good)
    spoiled = good["a"].clone()
    spoiled[2] = bad
    assert not tree.all_finite({"a": spoiled, "b": good["b"]})
    assert not tree.all_finite({"b": good["b"], "a": spoiled})


def test_infinities_that_would_cancel_are_found():
    assert not tree.all_finite((numbers(float("inf")), numbers(-float("inf"))))
    assert not tree.all_finite(numbers(float("inf"), -float("inf")))


@every("x", TREES)
def test_where_chooses_a_whole_tree(x):
    y = tree.map(lambda leaf: leaf + 1, x)
    torch.testing.assert_close(tree.where(torch.tensor(True), x, y), x)
    torch.testing.assert_close(tree.where(torch.tensor(False), x, y), y)


def test_where_does_not_touch_a_leaf_that_both_trees_share():
    shared = numbers(1.0)
    assert tree.where(torch.tensor(True), {"a": shared}, {"a": shared})["a"] is shared


def test_where_takes_one_condition_for_each_member_under_vmap(generator):
    x, y = torch.randn(2, 3, 4, generator=generator)
    condition = torch.tensor([True, False, True])
    chosen = vmap(tree.where)(condition, {"a": x}, {"a": y})["a"]
    torch.testing.assert_close(chosen, torch.where(condition[:, None], x, y))


@every("x", TREES)
def test_a_stack_is_what_vmap_takes_apart(x):
    stacked = tree.stack([x, tree.map(lambda leaf: leaf + 1, x)])
    first, second = (tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(2))
    torch.testing.assert_close((first, second), (x, tree.map(lambda leaf: leaf + 1, x)))


def test_a_batched_tensor_is_not_concrete_and_vmap_is_a_transform():
    seen = []

    def look(x):
        seen.append((tree.is_concrete(x), tree.is_transforming()))
        return x

    look(numbers(1.0))
    vmap(look)(numbers(1.0, 2.0))
    assert seen == [(True, False), (False, True)]


def test_a_condition_is_known_where_values_are():
    assert tree.is_surely(torch.tensor(True))
    assert not tree.is_surely(torch.tensor(False))
    assert not vmap(lambda x: torch.tensor(tree.is_surely(x)))(torch.tensor([True, True])).any()
    with FakeTensorMode():  # in which steps are traced to be compiled
        assert not tree.is_surely(torch.tensor(True))
