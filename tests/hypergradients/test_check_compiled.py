"""What is compiled gives the numbers of what is not, or is refused."""

import itertools

import pytest
import torch
from problems import assert_near, every
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from metafop import SGD, Adam, Training, functional, tree
from metafop.hypergradients import Adjoint, adjoint
from metafop.hypergradients.checks.compiled import check_agreement

COMPILED = Adjoint(compile=True)


def window(loss, shape, batch, optimizer=None):
    rng, optimizer = torch.Generator().manual_seed(0), optimizer or SGD()
    training, params = (
        Training(functional.plain(loss), optimizer),
        {"w": 0.3 * torch.randn(shape, generator=rng)},
    )
    meta = training.init_meta(params, lr=0.01)
    return training, lambda carry: carry.params["w"].square().sum(), meta, training.init(params), 2 * [batch]


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_a_second_derivative_through_complex_numbers_is_that_of_the_step(generator):
    def loss(params, batch):
        spectrum = torch.fft.rfft(batch @ params["w"])
        return torch.fft.irfft(spectrum * spectrum).tanh().square().sum()

    given = window(loss, (8, 8), torch.randn(8, 8, generator=generator))
    assert_near(COMPILED(*given).grads, adjoint(*given).grads, rtol=1e-4)


@every("part", {"forward": 0, "back": 1})
def test_what_the_compiler_gets_wrong_is_refused(part, generator, monkeypatch):
    import torch._inductor

    compiled, parts = torch._inductor.compile, itertools.count()

    def wrong(graph, examples, options):
        if next(parts) == part:
            for node in graph.graph.nodes:
                if node.target is torch.ops.aten.tanh.default or node.target is torch.ops.aten.neg.default:
                    node.target = torch.ops.aten.sin.default
            graph.recompile()
        return compiled(graph, examples, options)

    monkeypatch.setattr(torch._inductor, "compile", wrong)
    given = window(
        lambda params, x: (x @ params["w"]).tanh().square().sum(),
        (4, 2),
        torch.randn(6, 4, generator=generator),
    )
    with pytest.raises(ArithmeticError, match=r"A compiled step gives .+ where the step itself gives"):
        COMPILED(*given)


def test_a_loss_that_counts_its_calls_is_refused(generator):
    calls = itertools.count()

    def loss(params, batch):
        return (batch @ params["w"]).square().mean() * (1 + 0.1 * next(calls))

    with pytest.raises(ArithmeticError, match="comes out different"):
        COMPILED(*window(loss, (4, 2), torch.randn(6, 4, generator=generator)))


def test_random_numbers_in_a_compiled_step_are_refused(generator):
    """Eagerly this is a function of its arguments; compiled it would draw others at each call."""

    def loss(params, batch):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return F.dropout((batch @ params["w"]).tanh(), 0.5).square().mean()

    given = window(loss, (4, 2), torch.randn(6, 4, generator=generator))
    adjoint(*given)
    with pytest.raises(ValueError, match=r"draws random numbers \(aten.+Pass seeded=True"):
        COMPILED(*given)


def test_images_are_not_turned_for_a_loss_that_reads_memory_in_order(generator):
    def loss(params, images):
        rows = images.as_strided((4, 27), (27, 1))
        return (
            F.conv2d(images, params["w"]).tanh().mean()
            + (rows @ params["w"].flatten(1).T).tanh().square().mean()
        )

    given = window(loss, (4, 3, 3, 3), torch.randn(2, 3, 6, 6, generator=generator))
    assert_near(COMPILED(*given).grads, adjoint(*given).grads, 1e-10)


def test_a_sparse_batch_is_refused_compiled_and_right_as_it_is(generator):
    batch = torch.randn(6, 4, generator=generator)

    def loss(params, batch):
        return (batch.to_dense() @ params["w"]).tanh().square().mean()

    dense, sparse = window(loss, (4, 2), batch), window(loss, (4, 2), batch.to_sparse())
    assert_near(adjoint(*sparse).grads, adjoint(*dense).grads, 1e-12)
    with pytest.raises(TypeError, match=r"takes dense batches, got a sparse tensor .+ Pass its to_dense\(\)"):
        COMPILED(*sparse)


# What follows compares by hand: no compiler is needed to tell rounding from faults.


def agree(found, function, *given):
    check_agreement([found], function, [list(given)])


def test_a_difference_beyond_rounding_is_refused_with_both_numbers():
    x = torch.tensor([1.0, 2.0])
    agree([x.sin() * (1 + 1e-12)], lambda group: ([group[0].sin()],), x)
    with pytest.raises(ArithmeticError, match=r"gives 0.909388 where the step itself gives 0.909297"):
        agree([x.sin() * (1 + 1e-4)], lambda group: ([group[0].sin()],), x)


def test_what_is_not_a_number_in_both_agrees_and_in_one_does_not():
    x = torch.tensor([torch.nan, 1.0, torch.inf])
    agree([x.clone()], lambda group: ([group[0].clone()],), x)
    with pytest.raises(ArithmeticError, match="nan"):
        agree([x * torch.nan], lambda group: ([group[0].clone()],), x)


def test_integers_agree_to_the_bit():
    x = torch.tensor([2**40])
    with pytest.raises(ArithmeticError):
        agree([x + 1], lambda group: ([group[0].clone()],), x)


def test_the_sign_of_what_is_rounding_alone_may_differ():
    """As Adam's first step makes of the gradient of a bias before batch norm."""
    x = torch.linspace(1, 2, 32)

    def sign(group):
        return ([(group[0] - x + 1e-18).sign()],)

    agree([-sign([x])[0][0]], sign, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_adam_on_an_idle_bias_passes(dtype, generator):
    images = torch.randn(4, 2, 5, 5, generator=generator, dtype=dtype)
    kernel = torch.randn(3, 2, 3, 3, generator=generator, dtype=dtype)

    def loss(params, images):
        z = F.conv2d(images, kernel) + params["w"][:, None, None]
        return F.batch_norm(z, None, None, training=True).tanh().square().mean() + params["w"].mean() * 1e-30

    training, outer_loss, meta, carry, batches = window(loss, (3,), images, Adam())
    carry = training.init({"w": carry.params["w"].to(dtype)})
    meta = training.init_meta(carry.params, lr=0.01)
    COMPILED(training, outer_loss, meta, carry, batches)


LAYOUTS = {"as they are": lambda x: x, "transposed": lambda x: x.mT.contiguous().mT}


@every("layout", LAYOUTS)
def test_large_products_of_single_precision_are_given_to_onednn(layout, single_precision, generator):
    from metafop.hypergradients.matrix_products import ByOneDNN

    def products(a, b, c, few):
        return a @ b, torch.addmm(c, a, b), torch.addmm(c[0], a, b), few @ few

    sizes = ((128, 160), (160, 96), (128, 96), (4, 4))
    given = [layout(torch.randn(size, generator=generator)) for size in sizes]
    graph = make_fx(products, tracing_mode="fake")(*given)
    ByOneDNN()(graph.graph)
    graph.recompile()
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(torch.ops.mkldnn._linear_pointwise.default) == 3
    assert targets.count(torch.ops.aten.mm.default) == 1
    for x, y in zip(graph(*given), products(*(x.double() for x in given)), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@every("layout", LAYOUTS)
def test_compiled_steps_with_large_products_are_right(layout, single_precision, generator):
    x = layout(torch.randn(128, 160, generator=generator))
    given = window(lambda params, x: (x @ params["w"]).tanh().square().mean(), (160, 96), x)
    training, outer_loss, *others = given
    expected = adjoint(training, outer_loss, *tree.map(torch.Tensor.double, others))
    assert_near(tree.map(torch.Tensor.double, COMPILED(*given).grads), expected.grads, rtol=1e-4)
