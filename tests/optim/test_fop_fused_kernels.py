"""In float32, on a CPU, FOP calls torch's fused kernels where they can be called."""

from copy import deepcopy

import pytest
import torch
from optim_problems import MOMENTUM, MOMENTUMS, kernels, take, weights
from problems import assert_near, assert_same_bits, every
from torch import nn

from metafop import Adam, Dense, Diagonal, Identity, LowRank, Momentum, Spatial, tree
from metafop.optim import FOP, fused_sgd
from metafop.optim.meta_update import Leaf, MetaOptimizer


@pytest.fixture
def kernel_calls(monkeypatch):
    """Return a list that grows by one with each step that is taken by the kernel."""
    calls, whole = [], fused_sgd.step

    def counted(*args):
        calls.append(1)
        whole(*args)

    monkeypatch.setattr(fused_sgd, "step", counted)
    return calls


@every("settings", MOMENTUMS)
def test_the_base_steps_as_with_fused_true(settings, generator, kernel_calls):
    ours = weights(generator, (7, 5), (3,), (4, 4))
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = FOP(ours, torch.optim.SGD, preconditioner=Identity(), **settings)
    twin = torch.optim.SGD(theirs, **settings)
    for step in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            q.grad = p.grad.clone()
        twin.param_groups[0]["fused"] = step > 0  # FOP leaves the first step to the base
        optimizer.step()
        twin.step()
    assert len(kernel_calls) == 4
    assert_same_bits([p.detach() for p in ours], [q.detach() for q in theirs])
    velocities = [
        [o.state[p]["momentum_buffer"] for p in ps] for o, ps in ((optimizer, ours), (twin, theirs))
    ]
    assert_same_bits(*velocities)


@pytest.mark.parametrize(
    "wish",
    [{"foreach": True}, {"foreach": False}, {"fused": False}, {"fused": True}, {"lr": torch.tensor(0.05)}],
    ids=str,
)
def test_the_kernel_is_not_used_where_the_user_chooses_an_implementation(wish, generator, kernel_calls):
    params = weights(generator, (4, 3))
    take(FOP(params, torch.optim.SGD, **(MOMENTUM | wish)), params, generator, steps=3)
    assert not kernel_calls


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.1}, MOMENTUM | {"dampening": 0.5}, MOMENTUM | {"optimizer_class": torch.optim.RMSprop}],
)
def test_the_kernel_is_used_for_momentum_without_dampening_alone(settings, generator, kernel_calls):
    params = weights(generator, (4, 3))
    take(FOP(params, **settings), params, generator, steps=3)
    assert not kernel_calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_kernel_is_used_in_float32_alone(dtype, generator, kernel_calls):
    params = weights(generator, (4, 3), dtype=dtype)
    take(FOP(params, torch.optim.SGD, **MOMENTUM), params, generator, steps=3)
    assert not kernel_calls


def test_a_velocity_of_another_shape_never_gets_to_the_kernel(generator, kernel_calls):
    params = weights(generator, (4, 3))
    optimizer = FOP(params, torch.optim.SGD, **MOMENTUM)
    take(optimizer, params, generator, steps=2)
    optimizer.state[params[0]]["momentum_buffer"] = torch.zeros(2, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="size of tensor"):
        take(optimizer, params, generator)
    assert len(kernel_calls) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.double(),
        lambda p: p[:2].clone(),
        lambda p: p.contiguous(memory_format=torch.channels_last),
    ],
    ids=["type", "shape", "strides"],
)
def test_a_parameter_that_has_become_another_never_gets_to_the_kernel(change, generator, kernel_calls):
    params = weights(generator, (4, 2, 3, 3))
    optimizer = FOP(params, torch.optim.SGD, preconditioner=Identity(), **MOMENTUM)
    take(optimizer, params, generator, steps=2)
    params[0].data = change(params[0].data)
    params[0].grad = None
    try:
        take(optimizer, params, generator)
    except RuntimeError as error:
        assert "size of tensor" in str(error)  # torch's own words  # noqa: PT017
    assert len(kernel_calls) == 1


@pytest.mark.parametrize("part", ["parameter", "velocity"])
def test_data_of_another_size_never_gets_to_the_kernel(part, generator, kernel_calls):
    params = weights(generator, (8,))
    optimizer = FOP(params, torch.optim.SGD, preconditioner=Identity(), **MOMENTUM)
    take(optimizer, params, generator, steps=2)
    grad, velocity = params[0].grad, optimizer.state[params[0]]["momentum_buffer"]
    if part == "parameter":
        params[0].data = torch.cat([params[0].data, torch.ones(100_000, dtype=torch.float32)])
    else:
        velocity.data = velocity.data[:2].clone()
    assert grad is params[0].grad
    with pytest.raises(RuntimeError, match="size of tensor"):
        optimizer.step()
    assert len(kernel_calls) == 1


def test_flags_are_taken_as_true_or_false(generator, kernel_calls):
    params = weights(generator, (4, 3))
    take(FOP(params, torch.optim.SGD, nesterov=1, maximize=1, **MOMENTUM), params, generator, steps=3)
    assert len(kernel_calls) == 2


def test_autograd_sees_that_parameters_were_written_over(generator):
    layer = nn.Linear(3, 3, dtype=torch.float32)
    optimizer = FOP(layer.parameters(), torch.optim.SGD, **MOMENTUM)
    take(optimizer, list(layer.parameters()), generator, steps=3)
    loss = layer(layer(torch.ones(2, 3, dtype=torch.float32))).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_sparse_gradient_without_a_preconditioner_goes_to_the_base(generator, kernel_calls):
    embedding = nn.Embedding(4, 3, sparse=True, dtype=torch.float32)
    optimizer = FOP(embedding.parameters(), torch.optim.SGD, preconditioner=Identity(), **MOMENTUM)
    for _ in range(3):
        optimizer.zero_grad()
        embedding(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert not kernel_calls


def test_each_group_uses_the_kernel_or_not_whatever_the_others_do(generator, kernel_calls):
    params = weights(generator, (4, 3), (5, 2))
    groups = [{"params": params[:1]}, {"params": params[1:], "foreach": False}]
    optimizer = FOP(groups, torch.optim.SGD, interval=2, **MOMENTUM)
    twins = deepcopy(params)
    apart = [FOP([p], torch.optim.SGD, interval=2, seed=i, **MOMENTUM) for i, p in enumerate(twins)]
    for _ in range(6):
        for p, twin in zip(params, twins, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            twin.grad = p.grad.clone()
        optimizer.step()
        for one in apart:
            one.step()
    assert len(kernel_calls) == 15  # 5 of 6 steps, of one group of two, and of two optimizers
    for p, twin in zip(params, twins, strict=True):
        assert_near({"": p.detach()}, {"": twin.detach()}, 1e-6)


@pytest.mark.parametrize("preconditioner", ["fop", "pp-hd"])
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam])
def test_fused_bases_get_directions_in_the_memory_layout_of_their_parameters(base, preconditioner):
    ends = []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        p = kernels(generator, torch.channels_last)
        settings = {"lr": 0.1, "interval": 1, "meta_lr": 0.05, "preconditioner": preconditioner}
        take(FOP([p], base, fused=fused, **settings), [p], generator, steps=4)
        ends.append(p.detach())
    assert_near({"p": ends[0]}, {"p": ends[1]}, 1e-10)


def test_the_kernel_moves_m_as_the_pure_adam_does(generator):
    values = [torch.randn(shape, generator=generator, dtype=torch.float32) for shape in ((3, 4), (), (5,))]
    pure = {str(i): v.clone() for i, v in enumerate(values)}
    opt, meta = Adam().init(pure), MetaOptimizer(Adam())
    leaves = [Leaf(v, meta.init(v)) for v in values]
    for _ in range(5):
        grads = [torch.randn(v.shape, generator=generator, dtype=torch.float32) for v in values]
        leaves = meta.update(0.1, leaves, grads)
        hyper = tree.map(torch.Tensor.float, Adam().hyper(lr=0.1))
        pure, opt = Adam().update(hyper, pure, opt, {str(i): g for i, g in enumerate(grads)})
    assert_near({str(i): leaf.value for i, leaf in enumerate(leaves)}, pure, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_credit_is_added_up_in_place_as_by_the_pure_momentum(dtype, generator):
    memory = torch.zeros(3, 4, dtype=dtype)
    pure, hyper = (
        {"w": memory.clone()},
        tree.map(lambda x: x.to(dtype), Momentum().hyper(lr=1.0, momentum=0.9)),
    )
    for _ in range(5):
        grad = torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype)
        fused_sgd.add_to_credit(memory, grad, 0.9)
        _, pure = Momentum().credit(hyper, pure, {"w": grad})
    assert_same_bits(memory, pure["w"])


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("scale_free", [True, False])
@pytest.mark.parametrize("family", [LowRank(2), Dense(), Diagonal(), Spatial()], ids=repr)
@every("settings", MOMENTUMS)
def test_m_in_float32_is_m_in_float64_to_rounding(settings, family, scale_free, interval, kernel_calls):
    ends = []
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        shape = (6, 2, 3) if isinstance(family, Spatial) else (6, 5)
        params = weights(generator, shape, shape, (3,), dtype=torch.float64)
        params = [nn.Parameter(p.detach().to(torch.float32).to(dtype)) for p in params]
        asked = {"preconditioner": {"[01]": family, "2": Identity()}, "meta_lr": 0.01, "interval": interval}
        named = [(str(i), p) for i, p in enumerate(params)]
        optimizer = FOP(named, torch.optim.SGD, scale_free=scale_free, **asked, **settings)
        for step in range(12):
            optimizer.param_groups[0]["lr"] = 0.05 * 0.9**step  # as schedulers do
            take(optimizer, params, generator)
        learned = {k: m.double() for k, m in optimizer.inspect()[1].precond.items()}
        ends.append(({str(i): p.detach().double() for i, p in enumerate(params)}, learned))
    assert len(kernel_calls) == 11
    moved = (ends[1][1]["0"] - (torch.eye(*ends[1][1]["0"].shape) if family == Dense() else 0)).abs().max()
    assert moved > 0.02
    assert_near(ends[0], ends[1], 2e-5)


@pytest.mark.parametrize("changed", [{"lr": 0.01}, {"momentum": 0.5}, {"foreach": True}], ids=str)
def test_settings_that_change_during_training_do_the_same_in_float32_and_float64(changed):
    ends = []
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        params = weights(generator, (6, 5), (4, 4), dtype=dtype)
        optimizer = FOP(params, torch.optim.SGD, preconditioner=Dense(), interval=3, meta_lr=0.01, **MOMENTUM)
        generator = torch.Generator().manual_seed(1)
        for p in params:
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
        take(optimizer, params, generator, steps=6)
        optimizer.param_groups[0].update(changed)
        take(optimizer, params, generator, steps=9)
        ends.append({str(i): optimizer.state[p]["fop_m0"].double() for i, p in enumerate(params)})
    assert_near(ends[0], ends[1], 2e-5)
