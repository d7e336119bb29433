"""What is compiled is used for what it was compiled for, and for nothing else."""

import pytest
import torch

from metafop.hypergradients import compiled as compiled_module
from metafop.hypergradients.compiled import Compiled, Formed


def function(given, later):
    (numbers, others), (factors,) = given, later
    first, second, none = numbers
    assert none is None
    product = first.T @ second
    return ([product, second], [first.sum() + others[0].sum()]), ([factors[0] * product],)


def of_one(part):
    """Return a function of one list that works in its first part, and what its second is given."""
    return (lambda given, later: ((part(given[0]),), ([2 * later[0][0]],))), lambda given: ([torch.ones(1)],)


def ones_like_product(given):
    first, second, _ = given[0]
    return ([torch.ones(first.shape[1], second.shape[1], dtype=first.dtype)],)


def test_what_is_returned_has_the_form_that_is_known(generator):
    compiled = Compiled(function, ones_like_product)
    x, y, factor = *torch.randn(2, 4, 3, generator=generator), torch.randn(3, 3, generator=generator)
    turned = y.T.contiguous().T  # of the same shape, but other strides
    negated = torch.complex(x, y).conj().imag  # -y, by a mark
    for second in (y, turned, negated, y, turned):
        given = [x, second, None], [torch.ones(2)]
        returned, rest = compiled(*given)
        for each in (factor, factor.T):  # compiled for one of them
            expected, expected_rest = function(given, ([each],))
            torch.testing.assert_close(tuple(map(list, returned)), expected)
            torch.testing.assert_close(tuple(map(list, rest([each]))), expected_rest)
        for leaves in (*returned, *rest([factor])):
            assert leaves.form is Formed(list(leaves)).form
    assert len(compiled.built) == 2
    with torch.autocast("cpu", torch.bfloat16):
        ((product, _), _), _ = compiled([x.float(), y.float(), None], [torch.ones(2)])
    assert product.dtype == torch.bfloat16
    ((product, _), _), _ = compiled([x.float(), y.float(), None], [torch.ones(2)])
    assert product.dtype == torch.float32


def test_the_second_part_keeps_no_copy_of_what_is_there_already():
    """Neither of what the first part is given nor of what it returns."""

    def step(given, later):
        (x, y), (c,) = given[0], later[0]
        return ([x * y],), ([c * x, c * y, c * (x * y), c * (x + y).exp()],)

    compiled = Compiled(step, lambda given: ([torch.ones(1000)],))
    leaves = Formed([torch.ones(1000), torch.full((1000,), 0.5)])
    assert compiled.build(leaves).bytes_kept == 0
    _, rest = compiled(leaves)
    torch.testing.assert_close([*rest([torch.ones(1000)])[0]], step((leaves,), ([torch.ones(1000)],))[1][0])


def test_the_stride_of_a_single_entry_does_not_make_another_form():
    double = Compiled(*of_one(lambda xs: [2 * xs[0]]))
    column = torch.arange(12.0).view(3, 4, 1)
    for strides in ((4, 1, 1), (4, 1, 4)):  # both are contiguous
        ((doubled,),), _ = double([column.as_strided(column.shape, strides)])
        torch.testing.assert_close(doubled, 2 * column)
    assert len(double.built) == 1


def test_what_is_closed_over_leaves_no_graph_behind():
    teacher = torch.ones(3, requires_grad=True)
    ((returned,),), _ = Compiled(*of_one(lambda xs: [xs[0] * teacher]))([torch.ones(3)])
    assert not returned.requires_grad


def test_shapes_without_end_are_refused(monkeypatch):
    monkeypatch.setattr(compiled_module, "_LIMIT", 1)
    compiled = Compiled(*of_one(lambda xs: [2 * xs[0]]))
    compiled([torch.ones(1)])
    with pytest.raises(RuntimeError, match=r"for 1 forms of batches.* a few shapes, or pass compile=False"):
        compiled([torch.ones(2)])


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(KeyError, match="missing"):
        Compiled(*of_one(lambda xs: {}["missing"]))([torch.ones(1)])


def test_a_line_says_that_a_build_begins_and_one_how_long_it_took(caplog):
    double = Compiled(*of_one(lambda xs: [2 * xs[0]]))
    with caplog.at_level("INFO", logger="metafop"):
        double([torch.ones(1)])
        double([torch.zeros(1)])
    first, second = caplog.messages
    assert first.startswith("compiling a step")
    assert second.startswith("compiled it in ")
