"""In single precision, on a CPU, FOP takes torch's fused kernels: the same numbers, but for rounding."""

from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from optim_problems import assert_same, task
from problems import assert_near, assert_same_bits, every
from torch import nn

from metafop import Adam, Dense, Diagonal, Identity, LowRank, Momentum, Spatial, tree
from metafop.optim import FOP
from metafop.optim import fused_sgd
from metafop.optim.meta_update import Leaf, MetaOptimizer

MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
SETTINGS = {
    "heavy ball": MOMENTUM,
    "heavy ball, decayed": MOMENTUM | {"weight_decay": 0.01},
    "nesterov": MOMENTUM | {"nesterov": True},
    "nesterov, decayed": MOMENTUM | {"nesterov": True, "weight_decay": 0.01},
    "heavy ball, maximized": MOMENTUM | {"maximize": True},
}


@pytest.fixture
def kernel_calls(monkeypatch):
    """Return a list that grows by one with each step that is taken by the kernel."""
    calls, whole = [], fused_sgd.step

    def counted(*args):
        calls.append(1)
        whole(*args)

    monkeypatch.setattr(fused_sgd, "step", counted)
    return calls


def weights(generator, *shapes, dtype=torch.float32):
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def take(optimizer, params, generator, steps=1):
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        optimizer.step()


@every("settings", SETTINGS)
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


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("scale_free", [True, False])
@pytest.mark.parametrize("family", [LowRank(2), Dense(), Diagonal(), Spatial()], ids=repr)
@every("settings", SETTINGS)
def test_what_is_learned_is_what_is_learned_in_double_precision(
    settings, family, scale_free, interval, kernel_calls
):
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
def test_settings_that_change_on_the_way_change_what_they_do_in_double_precision(changed):
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


@pytest.mark.parametrize(
    "wish",
    [{"foreach": True}, {"foreach": False}, {"fused": False}, {"fused": True}, {"lr": torch.tensor(0.05)}],
    ids=str,
)
def test_how_a_step_is_computed_is_for_the_user_to_say(wish, generator, kernel_calls):
    params = weights(generator, (4, 3))
    take(FOP(params, torch.optim.SGD, **(MOMENTUM | wish)), params, generator, steps=3)
    assert not kernel_calls


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.1}, MOMENTUM | {"dampening": 0.5}, MOMENTUM | {"optimizer_class": torch.optim.RMSprop}],
)
def test_other_bases_take_their_own_steps(settings, generator, kernel_calls):
    params = weights(generator, (4, 3))
    take(FOP(params, **settings), params, generator, steps=3)
    assert not kernel_calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_precisions_are_left_to_the_base(dtype, generator, kernel_calls):
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


@pytest.mark.parametrize("velocity", ["gone", "none"])
def test_momentum_may_be_reset_before_any_step(velocity, generator):
    params = weights(generator, (6, 5))
    optimizer = FOP(params, torch.optim.SGD, interval=4, **MOMENTUM)
    for step in range(14):
        if step in (4, 7, 9):
            optimizer.state[params[0]].pop("momentum_buffer")
        if velocity == "none":
            optimizer.state[params[0]].setdefault("momentum_buffer", None)
        take(optimizer, params, generator)
    assert optimizer.state[params[0]]["fop_updates"] >= 2
    assert params[0].isfinite().all()


def test_a_step_that_stands_still_delays_no_lesson():
    lessons = []
    for dtype in (torch.float32, torch.float64):
        generator = torch.Generator().manual_seed(0)
        params = weights(generator, (6, 5), dtype=dtype)
        optimizer, learned = FOP(params, torch.optim.SGD, **MOMENTUM), []
        for step in range(25):
            optimizer.param_groups[0]["lr"] = 0.0 if step == 13 else 0.05
            before = optimizer.state[params[0]].get("fop_updates", 0)
            take(optimizer, params, generator)
            learned += [step] * (optimizer.state[params[0]]["fop_updates"] - before)
        lessons.append(learned)
    assert lessons == [[10, 20], [10, 20]]


@dataclass(frozen=True)
class Failing(Dense):
    """A family that fails when it is told to."""

    told: list = field(default_factory=list, hash=False)

    def apply(self, m, grad):
        if self.told:
            raise ArithmeticError("it was told to")
        return super().apply(m, grad)


def test_a_step_that_fails_after_learning_can_be_repeated(generator):
    params, told = weights(generator, (6, 5), (4, 4)), []
    groups = [{"params": params[:1]}, {"params": params[1:], "preconditioner": Failing(told)}]
    optimizer = FOP(groups, torch.optim.SGD, preconditioner=Dense(), interval=2, **MOMENTUM)
    take(optimizer, params, generator, steps=4)
    before = deepcopy(optimizer.state_dict())
    told.append(True)
    with pytest.raises(ArithmeticError, match="told to"):
        optimizer.step()
    assert_same(optimizer.state_dict(), before)
    told.clear()
    optimizer.step()
    assert optimizer.state[params[0]]["fop_updates"] == before["state"][0]["fop_updates"] + 1


def test_what_p_did_not_see_is_not_learned_from(generator):
    params = weights(generator, (6, 5))
    optimizer = FOP(params, torch.optim.SGD, interval=1, **MOMENTUM)
    take(optimizer, params, generator, steps=4)
    updates = optimizer.state[params[0]]["fop_updates"]
    for learn, more in ((("lr",), 0), (("precond",), 0), (("precond",), 1)):
        optimizer.param_groups[0]["learn"] = learn
        take(optimizer, params, generator)
        assert optimizer.state[params[0]]["fop_updates"] == updates + more
    u = optimizer.state[params[0]]["fop_memory"]
    assert u.norm() < 2.5 * 30**0.5  # of two gradients, not of seven


@pytest.mark.parametrize("cut", [8, 9, 10, 11, 12])
def test_training_stopped_while_the_base_takes_the_steps_ends_with_the_same_bits(cut):
    def trained(stops):
        generator = torch.Generator().manual_seed(0)
        params = weights(generator, (6, 5))
        params[0].data += 100  # so that Δθ is rounded
        settings = MOMENTUM | {"lr": 1e-4, "interval": 4}
        optimizer = FOP(params, torch.optim.SGD, **settings)
        for step in range(16):
            if step in stops:
                saved, optimizer = optimizer.state_dict(), FOP(params, torch.optim.SGD, **settings)
                optimizer.load_state_dict(deepcopy(saved))
            grad = torch.randn(5, 6, generator=generator, dtype=torch.float32).mT
            params[0].grad = grad if step in (9, 10, 11) else grad.contiguous()
            optimizer.step()
        return optimizer.state_dict()["state"]

    once, twice = trained([]), trained([cut])
    assert_same(twice, once)


def test_a_sparse_gradient_without_a_preconditioner_goes_to_the_base(generator, kernel_calls):
    embedding = nn.Embedding(4, 3, sparse=True, dtype=torch.float32)
    optimizer = FOP(embedding.parameters(), torch.optim.SGD, preconditioner=Identity(), **MOMENTUM)
    for _ in range(3):
        optimizer.zero_grad()
        embedding(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert not kernel_calls


def test_groups_go_each_its_own_way(generator, kernel_calls):
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


@pytest.mark.parametrize("cut", [1, 5, 9, 10, 11, 15])
def test_training_stopped_anywhere_between_two_lessons_ends_with_the_same_bits(cut, generator):
    problem = task(generator, torch.float32)
    copied = deepcopy(problem)
    make = partial(FOP, optimizer_class=torch.optim.SGD, **MOMENTUM)
    optimizer, first = make(problem.params), make(copied.params)
    problem.train(optimizer, steps=25)
    copied.train(first, steps=cut)
    second = make(copied.params)
    second.load_state_dict(deepcopy(first.state_dict()))
    copied.train(second, steps=25 - cut)
    assert_same(second.state_dict(), optimizer.state_dict())
    assert optimizer.state[problem.params[0]]["fop_updates"] == 2


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


@pytest.mark.parametrize("optimizer", [Adam(), Momentum()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_m_stays_where_it_is_if_any_hypergradient_is_not_finite(dtype, optimizer, generator):
    values = [torch.randn(3, 4, generator=generator, dtype=dtype), torch.ones(2, dtype=dtype)]
    meta = MetaOptimizer(optimizer)
    leaves = [Leaf(v, meta.init(v)) for v in values]
    wrong = [torch.full((3, 4), torch.inf, dtype=dtype), torch.ones(2, dtype=dtype)]
    leaves = meta.update(0.1, leaves, wrong)
    assert_same_bits([leaf.value for leaf in leaves], values)
    leaves = meta.update(0.1, leaves, [torch.ones(3, 4, dtype=dtype), torch.ones(2, dtype=dtype)])
    assert leaves[0].value.isfinite().all()
    assert (leaves[1].value < 1).all()


@dataclass(frozen=True)
class Half(Diagonal):
    """A family with a slip: what it returns is not like the gradient."""

    def apply(self, m, grad):
        return (m * grad)[: len(grad) // 2]


def test_a_direction_that_is_not_like_the_gradient_is_refused_and_nothing_changes(generator):
    params = weights(generator, (4, 3))
    before = [p.detach().clone() for p in params]
    optimizer = FOP(params, torch.optim.SGD, preconditioner=Half(), **MOMENTUM)
    with pytest.raises(RuntimeError, match=r"Half\(\) of '0' makes torch.float32, \(2, 3\), of a gradient"):
        take(optimizer, params, generator)
    assert_same_bits([p.detach() for p in params], before)
    assert not optimizer.state
