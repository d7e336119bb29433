"""Every family is the matrix that it says it is, and its pullback is the derivative of what it applies."""

import math

import pytest
import torch
from problems import FITTING, SHAPES, assert_near, every, fits, moved
from torch.func import vjp, vmap

from metafop import (
    Bounded,
    Dense,
    Diagonal,
    Identity,
    Kronecker,
    LowRank,
    Normalized,
    Rescaled,
    Scalar,
    Spatial,
    assign,
    tree,
)
from metafop.preconditioners import Aging

LEARNED = {k: (f, s) for k, (f, s) in FITTING.items() if f not in (Identity(), Normalized(Identity()))}
GRAMS = {k: (f, s) for k, (f, s) in FITTING.items() if isinstance(f, Dense | Spatial | LowRank | Kronecker)}
INNER = pytest.mark.parametrize(
    "family", [Scalar(), Diagonal(), Dense(), LowRank(rank=2), Kronecker()], ids=str
)


def learned(family, shape, generator, dtype=torch.float64):
    return moved(family.init(torch.zeros(shape, dtype=dtype), generator), generator)


def pair(shape, generator):
    return torch.randn(2, *shape, generator=generator)


@every("family, shape", FITTING)
def test_to_apply_is_to_multiply_rows_with_the_matrix(family, shape, generator):
    m, (grad, _) = learned(family, shape, generator), pair(shape, generator)
    p = family.matrix(m)
    rows = grad.reshape(-1, p.shape[-1])
    assert_near(family.apply(m, grad), (rows @ p).reshape(shape), rtol=1e-13)


@every("family, shape", FITTING)
def test_the_matrix_is_symmetric_with_the_eigenvalues_that_it_says(family, shape, generator):
    m = learned(family, shape, generator)
    p = family.matrix(m)
    assert_near(p, p.mT, rtol=1e-14)
    assert_near(family.eigenvalues(m).sort().values, torch.linalg.eigvalsh(p), rtol=1e-12)


@every("family, shape", FITTING)
def test_the_pullback_is_the_vjp_of_apply(family, shape, generator):
    m, (grad, cotangent) = learned(family, shape, generator), pair(shape, generator)
    pull = vjp(lambda m: family.apply(m, grad), m)[1]
    pulled, size = family.pullback(m, grad, cotangent), grad.norm() * cotangent.norm()
    assert_near(pulled, pull(cotangent)[0], rtol=1e-12, size=size)


@every("family, shape", GRAMS)
def test_no_direction_is_turned_around(family, shape, generator):
    p = family.matrix(learned(family, shape, generator))
    smallest = torch.linalg.eigvalsh(p).min()
    assert smallest >= (1 - 1e-12 if isinstance(family, LowRank) else -1e-12)


@every("family, shape", FITTING)
def test_dimension_and_norm_are_those_of_the_matrix(family, shape, generator):
    m = learned(family, shape, generator)
    p = family.matrix(m)
    assert family.dimension(m) == len(p)
    torch.testing.assert_close(family.norm(m), torch.linalg.matrix_norm(p), rtol=1e-13, atol=0)


@every("family, shape", FITTING)
def test_learning_starts_at_the_identity(family, shape, generator):
    grad, _ = pair(shape, generator)
    first = family.apply(family.init(grad, generator), grad)
    limit = family.limit if isinstance(family, Bounded) else 1.0
    near = 0.01 if isinstance(family, LowRank) or family == Normalized(LowRank(rank=2)) else 1e-15
    assert_near(first, limit * grad, rtol=near)


@every("family, shape", GRAMS)
def test_a_stack_is_a_loop(family, shape, generator):
    ms = [learned(family, shape, generator) for _ in range(3)]
    grads, cotangents = torch.randn(2, 3, *shape, generator=generator)
    m = tree.stack(ms)
    one_by_one = [family.apply(*each) for each in zip(ms, grads, strict=True)]
    assert_near(family.apply(m, grads), torch.stack(one_by_one), rtol=1e-14)
    pulled = [family.pullback(*each) for each in zip(ms, grads, cotangents, strict=True)]
    assert_near(family.pullback(m, grads, cotangents), tree.stack(pulled), rtol=1e-14)


@every("family, shape", LEARNED)
def test_vmap_over_tensors_and_gradients_is_a_loop(family, shape, generator):
    ms = [learned(family, shape, generator) for _ in range(3)]
    grads, cotangents = torch.randn(2, 3, *shape, generator=generator)
    one_by_one = [family.apply(*each) for each in zip(ms, grads, strict=True)]
    assert_near(vmap(family.apply)(tree.stack(ms), grads), torch.stack(one_by_one), rtol=1e-13)
    pulled = [family.pullback(*each) for each in zip(ms, grads, cotangents, strict=True)]
    at_once, size = vmap(family.pullback)(tree.stack(ms), grads, cotangents), grads.norm() * cotangents.norm()
    assert_near(at_once, tree.stack(pulled), rtol=1e-12, size=size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every("family, shape", FITTING)
def test_a_gradient_in_half_precision_stays_in_it(family, shape, dtype, generator):
    m = learned(family, shape, generator, dtype)
    grad, cotangent = (x.to(dtype) for x in pair(shape, generator))
    assert {leaf.dtype for leaf in tree.leaves(m)} <= {torch.float32}
    assert family.apply(m, grad).dtype == dtype
    pulled = family.pullback(m, grad, cotangent)
    assert tree.map(lambda x: (x.dtype, x.shape), pulled) == tree.map(lambda x: (x.dtype, x.shape), m)


@INNER
def test_a_normalized_matrix_has_the_norm_of_the_identity(family, generator):
    p = Normalized(family).matrix(learned(family, (3, 4), generator))
    torch.testing.assert_close(
        torch.linalg.matrix_norm(p), torch.tensor(math.sqrt(len(p))), rtol=1e-14, atol=0
    )


def test_the_hypergradient_of_a_normalized_matrix_is_orthogonal_to_it(generator):
    family, (grad, cotangent) = Normalized(Dense()), pair((3, 4), generator)
    m = learned(family, (3, 4), generator)
    pulled = family.pullback(m, grad, cotangent)
    assert abs(tree.dot(pulled, m)) < 1e-14 * pulled.norm() * m.norm()


@pytest.mark.parametrize("size", [0.0, 0.1, 1.0, 10.0, 1e6])
@INNER
def test_a_bounded_matrix_stays_within_its_limit_and_is_left_alone_below(family, size, generator):
    m = tree.scale(learned(family, (3, 4), generator), size)
    free, bounded = family.matrix(m), Bounded(family, limit=2.0).matrix(m)
    largest = 2.0 * len(free) ** 0.5
    assert torch.linalg.matrix_norm(bounded) <= largest * (1 + 1e-12)
    factor = min(1.0, largest / torch.linalg.matrix_norm(free).clamp(min=1e-300).item())
    assert_near(bounded, factor * free, rtol=1e-12)


@pytest.mark.parametrize("time", [1.0, 2.0, 10.0, 1e8])
@INNER
def test_a_rescaled_matrix_goes_from_its_own_norm_to_the_limit(family, time, generator):
    m = learned(family, (3, 4), generator)
    p = family.matrix(m)
    norm, delta = torch.linalg.matrix_norm(p), time**-2
    gamma = delta * norm + (1 - delta) * 0.3
    rescaled = Rescaled(family, limit=0.3).matrix(Aging(m, torch.tensor(time)))
    assert_near(rescaled, gamma * p / norm, rtol=1e-12)


def on_paper(family, m, g, p):
    """Return ∂⟨G, P Gp⟩ in m as worked out by hand, G and Gp laid out (inputs, outputs)."""
    match family:
        case Scalar():
            return (g * p).sum()
        case Diagonal():
            return (g * p).mT
        case Dense() | LowRank():
            return (g @ p.mT + p @ g.mT) @ m
        case Normalized():
            big = m @ m.mT
            size, along = big.square().sum().sqrt(), (g * (big @ p)).sum()
            return math.sqrt(len(m)) / size * (g @ p.mT + p @ g.mT - 2 * along / size**2 * big) @ m
        case Kronecker():
            inside, outside = p @ m.outputs @ m.outputs.mT, m.inputs @ m.inputs.mT @ p
            return type(m)(
                (g @ inside.mT + inside @ g.mT) @ m.inputs, (g.mT @ outside + outside.mT @ g) @ m.outputs
            )


@pytest.mark.parametrize("shape", [(3, 4), (1, 6), (7, 2)], ids=str)
@pytest.mark.parametrize(
    "family",
    [Scalar(), Diagonal(), Dense(), LowRank(rank=2), Normalized(Dense()), Kronecker()],
    ids=str,
)
def test_the_pullback_is_the_formula_on_paper(family, shape, generator):
    m, (grad, cotangent) = learned(family, shape, generator), pair(shape, generator)
    assert_near(family.pullback(m, grad, cotangent), on_paper(family, m, cotangent.mT, grad.mT), rtol=1e-13)


def test_the_pullback_over_kernels_is_the_formula_on_paper(generator):
    m, (grad, cotangent) = learned(Spatial(), (4, 2, 3, 3), generator), pair((4, 2, 3, 3), generator)
    cross = torch.einsum("oixy,oizw->xyzw", cotangent, grad).reshape(9, 9)
    assert_near(Spatial().pullback(m, grad, cotangent), (cross + cross.mT) @ m, rtol=1e-13)


@pytest.mark.parametrize(
    "family", [Normalized(Dense()), Bounded(Dense()), Rescaled(Dense(), limit=0.3)], ids=str
)
def test_a_matrix_of_zeros_stays_zero(family, generator):
    m = tree.scale(family.init(torch.zeros(3, 4), generator), 0.0)
    m = Aging(m.inner, torch.tensor(2.0)) if isinstance(m, Aging) else m
    grad, _ = pair((3, 4), generator)
    assert torch.equal(family.apply(m, grad), torch.zeros(3, 4))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_family_by_shape_fits(shape, generator):
    family = assign({"w": torch.zeros(shape)})["w"]
    assert fits(family, shape)
    assert family.apply(family.init(torch.zeros(shape), generator), torch.ones(shape)).shape == shape


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_wrappers_hold_for_matrices_whose_fourth_powers_do_not_fit_float32(size):
    m, grad = size * torch.eye(4, dtype=torch.float32), torch.ones(3, 4, dtype=torch.float32)
    torch.testing.assert_close(Normalized(Dense()).apply(m, grad), grad)
    bounded = Bounded(Dense(), limit=2.0).apply(m, grad)
    torch.testing.assert_close(bounded, min(2.0, size**2) * grad)
