"""What diagnostics say of matrices, gradients and hyperparameters known by hand."""

import math
from typing import Any

import pytest
import torch
from torch.func import vmap

from metafop import (
    SGD,
    Adam,
    Bounded,
    Dense,
    Diagonal,
    Identity,
    Kronecker,
    LowRank,
    Meta,
    Momentum,
    Normalized,
    Online,
    Rescaled,
    Scalar,
    Spatial,
    Training,
    diagnostics,
    functional,
    tree,
)
from metafop.preconditioners import Aging, KroneckerFactors

close = torch.testing.assert_close
loss = functional.plain(lambda params, batch: params["w"].square().sum())

# A plane of 3×3 positions: 12 pairs of neighbours, 24 of others.
NEIGHBOURS = [(0, 1), (1, 2), (3, 4), (4, 5), (6, 7), (7, 8), (0, 3), (1, 4), (2, 5), (3, 6), (4, 7), (5, 8)]


def tensor(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def one(family, m):
    """Return a training of one parameter "w" with this preconditioner, and its meta."""
    return Training(loss, SGD(), {"w": family}), Meta(SGD().hyper(lr=0.1), {"w": m})


def spatial(own=2.0, near=-0.25, far=0.1):
    """Return the P with these weights, 9 by 9, and an M with P = M Mᵀ."""
    p = torch.full((9, 9), far, dtype=torch.float64)
    p[range(9), range(9)] = own
    for i, j in NEIGHBOURS:
        p[i, j] = p[j, i] = near
    return p, torch.linalg.cholesky(p)


def weights(training, meta, kernel):
    grads = {"w": torch.ones(4, 2, *kernel, dtype=torch.float64)}
    scalars = diagnostics.whitening(training, meta, grads)
    return [scalars[f"whitening_{part}/w"].item() for part in ("self", "neighbours", "distant", "index")]


def test_spectrum_of_a_known_matrix():
    # M = diag(3, 1) turned: P has the eigenvalues 9 and 1.
    turn = tensor([0.6, -0.8], [0.8, 0.6])
    training, meta = one(Dense(), turn @ torch.diag(tensor(3.0, 1.0)))
    close(diagnostics.eigenvalues(training, meta), {"w": tensor(1.0, 9.0)})
    expected = {
        "eigenvalue_max/w": 9.0,
        "eigenvalue_min/w": 1.0,
        "eigenvalue_mean/w": 5.0,
        "norm/w": math.sqrt(82.0),
        "norm_spectral/w": 9.0,
        "condition/w": 9.0,
    }
    close(diagnostics.spectra(training, meta), {k: tensor(v).squeeze() for k, v in expected.items()})


def test_negative_eigenvalues_count_by_size_in_norm_and_condition():
    scalars = diagnostics.spectra(*one(Diagonal(), tensor(-4.0, 2.0)))
    assert [scalars[f"{k}/w"] for k in ("eigenvalue_min", "norm_spectral", "condition")] == [-4.0, 4.0, 2.0]


def test_a_singular_matrix_has_an_infinite_condition_number():
    assert diagnostics.spectra(*one(Diagonal(), tensor(3.0, 0.0)))["condition/w"] == math.inf


def test_tensors_that_are_not_finite_have_eigenvalues_that_are_not():
    training, meta = one(Dense(), tensor([1.0, math.nan], [0.0, 1.0]))
    assert diagnostics.eigenvalues(training, meta)["w"].isnan().all()
    assert all(value.isnan() for value in diagnostics.spectra(training, meta).values())


def test_kronecker_of_a_wide_layer_forms_no_matrix():
    # P itself would be a million by a million.
    factors = KroneckerFactors(2 * torch.eye(1000), torch.eye(1000))
    scalars = diagnostics.summary(*one(Kronecker(), factors), {"w": torch.ones(1000, 1000)})
    assert scalars["eigenvalue_max/w"] == 4
    close(scalars["norm/w"], torch.tensor(4000.0))


def test_angle_of_known_directions():
    for degrees in (0.0, 30.0, 90.0, 135.0, 180.0):
        turned = tensor(math.cos(math.radians(degrees)), math.sin(math.radians(degrees)))
        close(diagnostics.angle(tensor(7.0, 0.0), 1e-3 * turned).item(), degrees)


@pytest.mark.parametrize("radians", [1e-8, 1e-5, 1e-2])
def test_tiny_angles_are_exact(radians):
    generator = torch.Generator().manual_seed(0)
    # A rotation by this angle in the plane of two unit vectors, and a stretch.
    u, v = torch.linalg.qr(torch.randn(50, 2, dtype=torch.float64, generator=generator)).Q.mT
    found = diagnostics.angle(u, 7 * (math.cos(radians) * u + math.sin(radians) * v)).item()
    close(math.radians(found), radians, rtol=1e-7, atol=0)


def test_angles_are_those_between_gradient_and_direction():
    # (1, 1) becomes (1, √3), from 45° to 60°.
    training, meta = one(Diagonal(), tensor(1.0, math.sqrt(3.0)))
    close(diagnostics.angles(training, meta, {"w": tensor(1.0, 1.0)}), {"angle/w": tensor(15.0).squeeze()})


def test_angles_at_zero_are_finite():
    assert diagnostics.angle(tensor(0.0, 0.0), tensor(0.0, 0.0)) == 0
    close(diagnostics.angle(tensor(1.0, 0.0), tensor(0.0, 0.0)).item(), 90.0)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_angles_do_not_depend_on_the_size_of_the_gradient(size):
    x, y = tensor(size, size, dtype=torch.float32), tensor(size, 0.0, dtype=torch.float32)
    close(diagnostics.angle(x, y).item(), 45.0, rtol=1e-6, atol=0)


def test_whitening_of_a_known_matrix():
    _, m = spatial(own=2.0, near=-0.25, far=0.1)
    close(weights(*one(Spatial(), m), (3, 3)), [2.0, -0.25, 0.1, 0.125])


def test_whitening_is_a_mean_over_pairs():
    p, _ = spatial(own=2.0, near=0.0, far=0.0)
    p[4, 5] = p[5, 4] = -0.6  # one of 12 pairs of neighbours
    p[2, 3] = p[3, 2] = 0.48  # the end of a row and the start of the next: one of 24 others
    close(weights(*one(Spatial(), torch.linalg.cholesky(p)), (3, 3)), [2.0, -0.05, 0.02, 0.025])


def test_whitening_index_is_zero_at_multiples_of_the_identity_and_the_sign_of_decorrelation():
    identity = torch.eye(9, dtype=torch.float64)
    together, apart = spatial(near=0.25)[1], spatial(near=-0.25)[1]
    index = [weights(*one(Spatial(), m), (3, 3))[3] for m in (0 * identity, 1.5 * identity, together, apart)]
    close(index, [0.0, 0.0, -0.125, 0.125])


def test_whitening_takes_kernels_of_any_shape():
    p = tensor([2.0, -0.5, 0.3], [-0.5, 2.0, -0.5], [0.3, -0.5, 2.0])
    m = torch.linalg.cholesky(p)
    close(weights(*one(Spatial(), m), (3,)), [2.0, -0.5, 0.3, 0.25])
    close(weights(*one(Spatial(), m), (3, 1)), [2.0, -0.5, 0.3, 0.25])
    close(weights(*one(Spatial(), m[:2, :2]), (1, 2)), [2.0, -0.5, 0.0, 0.25])
    close(weights(*one(Spatial(), m[:1, :1]), (1, 1)), [2.0, 0.0, 0.0, 0.0])


def test_whitening_looks_into_wrapped_families_and_at_spatial_ones_only():
    _, m = spatial()
    index = [weights(*one(family, m), (3, 3))[3] for family in (Normalized(Spatial()), Bounded(Spatial()))]
    index.append(weights(*one(Rescaled(Spatial(), 0.5), Aging(m, tensor(3.0).squeeze())), (3, 3))[3])
    close(index, [0.125] * 3)
    assert not diagnostics.whitening(*one(Dense(), m), {"w": torch.ones(2, 9)})


def test_hyperparameters_are_named_once_or_for_each_parameter():
    hyper = Momentum().hyper(lr={"conv.weight": 0.1, "conv.bias": 0.2}, momentum=0.9)
    found = {k: v.item() for k, v in diagnostics.hyper(Meta(hyper, {})).items()}
    assert found == {
        "hyper/lr/conv.weight": 0.1,
        "hyper/lr/conv.bias": 0.2,
        "hyper/momentum": 0.9,
        "hyper/weight_decay": 0.0,
    }


def test_norms_of_gradients_and_directions():
    training, meta = one(Scalar(), tensor(2.0).squeeze())
    meta = Meta(meta.hyper, meta.precond | {"bias": ()})
    grads = {"w": tensor(3.0, 0.0), "bias": tensor(4.0)}
    scalars = diagnostics.summary(training, meta, grads)
    found = {k: v.item() for k, v in scalars.items() if "_norm" in k}
    assert found == {"gradient_norm": 5, "gradient_norm/w": 3, "gradient_norm/bias": 4, "direction_norm/w": 6}


def test_parameters_for_which_nothing_is_learned_have_no_spectrum():
    params = {"w": torch.ones(2, 3), "v": torch.ones(3), "bias": torch.ones(2)}
    training = Training(loss, SGD(), {"w": Normalized(Identity()), "v": LowRank(rank=2)})
    meta = training.init_meta(params, torch.Generator().manual_seed(0), lr=0.1)
    assert diagnostics.eigenvalues(training, meta).keys() == {"v"}
    assert diagnostics.angles(training, meta, params).keys() == {"angle/v"}


def test_summary_of_an_online_learner_is_its_hyperparameters_and_gradients():
    training, params = Training(loss, SGD(), {"w": Dense()}), {"w": torch.ones(2)}
    meta, carry = training.init_meta(params, lr=0.1), training.init(params)
    online: Any = Online(training, Adam())
    outer_meta, state = online.init_meta(meta, lr=0.01), online.init(meta, carry)
    seen = online.evaluate(outer_meta, state, ())
    above, below = (
        diagnostics.summary(*x, seen.grads) for x in ((online, outer_meta), (training, state.meta))
    )
    hyper = {f"hyper/{name}" for name in ("lr", "betas/0", "betas/1", "eps", "weight_decay")}
    assert above.keys() == hyper | {"gradient_norm", "gradient_norm/w"}
    assert {"condition/w", "angle/w", "hyper/lr"} <= below.keys()


@pytest.mark.parametrize(
    "family",
    [Scalar(), Diagonal(), Dense(), Spatial(), LowRank(2), Kronecker(), Normalized(Spatial())],
    ids=str,
)
def test_summary_under_vmap_is_that_of_each(family):
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.ones(3, 2, 2, 2, dtype=torch.float64)}
    training = Training(loss, SGD(), {"w": family})
    meta = training.init_meta(params, generator, lr=0.1)
    grads = {"w": torch.randn(4, 3, 2, 2, 2, dtype=torch.float64, generator=generator)}
    sizes = tensor(0.5, 1.0, 2.0, 3.0)

    def summary(size, grads):
        return diagnostics.summary(training, Meta(meta.hyper, tree.scale(meta.precond, size)), grads)

    together = vmap(summary)(sizes, grads)
    for i, size in enumerate(sizes):
        close({k: v[i] for k, v in together.items()}, summary(size, {"w": grads["w"][i]}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_looked_at_in_float32(dtype):
    params = {"w": torch.full((2, 3), 0.01, dtype=dtype)}
    training = Training(loss, SGD(), {"w": Dense()})
    scalars = diagnostics.summary(training, training.init_meta(params, lr=0.1), params)
    assert {value.dtype for value in scalars.values()} == {torch.float32}


def test_a_family_that_cannot_be_inspected_has_angles_but_no_spectrum():
    class Halving:
        def init(self, param, generator=None):
            return param.new_ones(())

        def apply(self, m, grad):
            return 0.5 * m * grad

        def pullback(self, m, grad, cotangent):
            return 0.5 * (grad * cotangent).sum()

    training = Training(lambda params, buffers, batch: (params["w"].sum(), buffers), SGD(), {"w": Halving()})
    params = {"w": torch.ones(3)}
    scalars = diagnostics.summary(training, training.init_meta(params, lr=0.1), params)
    assert scalars["angle/w"] == 0
    assert not any(name.startswith(("eigenvalue", "norm")) for name in scalars)


def test_leaves_of_the_loss_are_summed_up_by_name():
    meta = Meta(SGD().hyper(lr=0.1), {}, {"l2": torch.tensor(0.5), "weights": torch.tensor([1.0, 4.0])})
    expected = {"loss/l2": 0.5, "loss/weights/mean": 2.5, "loss/weights/min": 1.0, "loss/weights/max": 4.0}
    assert diagnostics.leaves(meta) == expected
    assert diagnostics.leaves(meta._replace(loss=torch.tensor(2.0))) == {"loss": 2.0}
    training = Training(lambda params, buffers, batch, leaves: (params["w"].sum(), buffers), SGD())
    assert expected.keys() <= diagnostics.summary(training, meta, {"w": torch.ones(2)}).keys()
