"""FOP stays out of the traps that catch optimizers in real training: checkpoints, precision, failures."""

import pickle
import sys
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from optim_problems import ALL, BASES, Descent, assert_same, kept, learned, resumed, task
from problems import every
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from metafop import Diagonal, Rescaled
from metafop.optim import FOP

RESUMED = {name: make for name, make in ALL.items() if name != "sgd"}
ZEROS = {"number": lambda: 0.0, "tensor": lambda: torch.tensor(0.0)}


pytestmark = pytest.mark.usefixtures("precision")


def zero_step(optimizer: Optimizer, zero: Any) -> None:
    """Step as torch.distributed.checkpoint does to make state: zero gradients, and an lr of zero."""
    old = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = zero
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    for group, lr in zip(optimizer.param_groups, old, strict=True):
        group["lr"] = lr
    optimizer.zero_grad()


# Trap 1: torch.distributed.checkpoint


@every("zero", ZEROS)
@every("make", ALL)
def test_the_first_step_of_zeros_makes_all_state_and_teaches_nothing(make, zero, generator):
    problem = task(generator)
    plain = deepcopy(problem)
    optimizer, other = make(problem.params, interval=1), make(plain.params, interval=1)
    zero_step(optimizer, zero())
    keys = [sorted(state) for state in optimizer.state.values()]
    group = sorted(optimizer.param_groups[0])
    assert_same(problem.params, plain.params)

    problem.train(optimizer, steps=1)
    plain.train(other, steps=1)
    assert_same(learned(optimizer), learned(other))

    problem.train(optimizer, steps=3)
    assert [sorted(state) for state in optimizer.state.values()] == keys
    assert sorted(optimizer.param_groups[0]) == group


@every("zero", ZEROS)
@every("make", ALL)
def test_a_later_step_of_zeros_teaches_nothing_nor_does_the_next(make, zero, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=1)
    problem.train(optimizer, steps=4)
    before = learned(optimizer)
    zero_step(optimizer, zero())
    after = learned(optimizer)
    problem.train(optimizer, steps=1)
    assert_same(after, before)
    assert_same(learned(optimizer), before)

    problem.train(optimizer, steps=1)
    assert [k for k, x in learned(optimizer).items() if torch.equal(x, before[k])] == []


@every("make", RESUMED)
def test_a_distributed_checkpoint_continues_the_same_bits(make, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=3)
    problem.train(optimizer, steps=4)
    copied = deepcopy(problem)
    loaded = make(copied.params, interval=3)
    saved = resumed(get_optimizer_state_dict(problem.model, optimizer))
    set_optimizer_state_dict(copied.model, loaded, saved)

    problem.train(optimizer, steps=5)
    copied.train(loaded, steps=5)
    assert_same(kept(loaded), kept(optimizer))


# Trap 2: state that is saved empty


@every("make", ALL)
def test_state_is_saved_whole_while_gradients_remain(make, generator):
    problem = task(generator)
    optimizer = make(problem.params)
    problem.train(optimizer, steps=1)
    assert all(p.grad is not None for p in problem.params)
    state = optimizer.state_dict()["state"]
    with_p = [i for i, p in enumerate(problem.params) if p.dim() > 1]
    assert [i for i in with_p if "fop_m0" not in state.get(i, {})] == []


# Trap 3: copies


@pytest.mark.parametrize(
    "copy", [deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
@every("make", ALL)
def test_a_copy_with_its_model_continues_the_same_bits(make, copy, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=3)
    problem.train(optimizer, steps=4)
    problem_copy, optimizer_copy = copy((problem, optimizer))
    assert [id(p) for g in optimizer_copy.param_groups for p in g["params"]] == [
        *map(id, problem_copy.params)
    ]

    problem.train(optimizer, steps=5)
    before = kept(optimizer)
    problem_copy.train(optimizer_copy, steps=5)
    assert_same(kept(optimizer_copy), before)
    assert_same(kept(optimizer), before)


# Trap 4: a learning rate that is a tensor


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@every("make", ALL)
def test_a_tensor_lr_is_read_and_never_written(make, shape, generator):
    problem = task(generator)
    lr = torch.full(shape, 0.01)
    optimizer = make(problem.params, lr=lr, interval=1)
    losses = problem.train(optimizer, steps=5)
    assert optimizer.param_groups[0]["lr"] is lr
    assert_same(lr, torch.full(shape, 0.01))
    assert losses[-1] < losses[0]


@every("make", ALL)
def test_an_lr_of_two_numbers_is_refused(make, generator):
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        make(task(generator).params, lr=torch.tensor([0.1, 0.1]))


# Trap 5: mixed precision


@every("make", ALL | {"fused adamw": partial(BASES["adamw"], fused=True)})
def test_a_step_that_the_scaler_skips_leaves_no_trace(make, generator):
    problem = task(generator, torch.float32)
    optimizer = make(problem.params, interval=1)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    problem.train(optimizer, steps=3)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(problem.loss()).backward()
    problem.params[2].grad[0, 0] = torch.inf
    before = kept(optimizer) | {"grads": None}
    scaler.step(optimizer)
    scaler.update()
    assert_same(kept(optimizer) | {"grads": None}, before)


@every("make", ALL | {"fused adamw": partial(BASES["adamw"], fused=True)})
def test_training_with_a_scaler_is_training_without(make, generator):
    scaled = task(generator)
    plain = deepcopy(scaled)
    plain.train(make(plain.params, interval=1), steps=5)

    optimizer, scaler = make(scaled.params, interval=1), torch.amp.GradScaler("cpu")
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(scaled.loss()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same(scaled.params, plain.params)


@every("make", ALL)
def test_training_under_autocast_lowers_the_loss(make, generator):
    problem = task(generator, torch.float32)
    optimizer = make(problem.params, interval=1)
    first = problem.loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = problem.loss()
        loss.backward()
        optimizer.step()
    assert problem.loss().item() < first


# Trap 6: the gradient is the user's


@every("make", ALL)
def test_a_step_leaves_gradients_as_they_are(make, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=1)
    problem.train(optimizer, steps=2)
    problem.backward()
    grads = [p.grad for p in problem.params]
    values = deepcopy(grads)
    optimizer.step()
    assert [id(p.grad) for p in problem.params] == [id(g) for g in grads]
    assert_same(grads, values)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_failing_base_leaves_everything_as_it_was(steps, generator, monkeypatch):
    problem = task(generator)
    optimizer = FOP(problem.params, Descent, interval=1)
    problem.train(optimizer, steps=steps)
    problem.backward()
    before, grads = kept(optimizer), [id(p.grad) for p in problem.params]
    monkeypatch.setattr(Descent, "fails", True)
    with pytest.raises(ArithmeticError, match="the base has failed"):
        optimizer.step()
    assert_same(kept(optimizer), before)
    assert [id(p.grad) for p in problem.params] == grads


def test_a_failing_base_leaves_the_time_of_a_family_as_it_was(generator, monkeypatch):
    problem = task(generator)
    family = Rescaled(Rescaled(Diagonal(), limit=2.0), limit=0.5)
    optimizer = FOP(problem.params, Descent, preconditioner=family, interval=1)
    problem.train(optimizer, steps=3)
    problem.backward()
    before = kept(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(Descent, "fails", True)
        with pytest.raises(ArithmeticError, match="the base has failed"):
            optimizer.step()
    assert_same(kept(optimizer), before)
    optimizer.step()
    for m in optimizer.inspect()[1].precond.values():
        assert m.time == m.inner.time == 4  # it starts at 1, and the first step is not learned from


@pytest.mark.parametrize("steps", [3, 4, 5])
@pytest.mark.parametrize("interval", [1, 3])
@every("make", {name: make for name, make in ALL.items() if name != "rmsprop"})
def test_a_step_that_failed_can_be_repeated(make, interval, steps, generator, monkeypatch):
    problem = task(generator)
    other = deepcopy(problem)
    make = partial(make, interval=interval, foreach=False)  # the base's own step, for it to fail
    optimizer, plain = make(problem.params), make(other.params)
    problem.train(optimizer, steps=steps)
    other.train(plain, steps=steps)
    problem.backward()
    before = kept(optimizer)
    with monkeypatch.context() as patch:
        for name in ("sgd", "adam"):
            patch.setattr(sys.modules[f"torch.optim.{name}"], name, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert_same(kept(optimizer), before)

    problem.train(optimizer, steps=4)
    other.train(plain, steps=4)
    assert_same(kept(optimizer), kept(plain))


# Trap 7: what is missing, late, negated or of a kind that cannot be


def quadratic(params: list[Tensor], optimizer: Optimizer, steps: int) -> None:
    for _ in range(steps):
        for p in params:
            p.grad = 2 * p.detach() + 0.1
        optimizer.step()


@every("make", BASES)
def test_a_parameter_without_a_gradient_rests_while_others_go_on(make, generator):
    one, other, alone = (nn.Parameter(x) for x in torch.randn(3, 4, 3, generator=generator))
    alone.data.copy_(one.data)
    optimizer, single = make([one, other], interval=1), make([alone], interval=1)
    quadratic([one, other], optimizer, steps=3)
    other.grad = None
    value, state = deepcopy((other.data, optimizer.state[other]))
    quadratic([one], optimizer, steps=3)
    assert_same((other.data, optimizer.state[other]), (value, state))

    quadratic([one, other], optimizer, steps=3)
    quadratic([alone], single, steps=9)
    assert_same((one, optimizer.state[one]), (alone, single.state[alone]))
    assert not torch.equal(optimizer.state[other]["fop_m0"], state["fop_m0"])


@every("make", ALL)
def test_a_group_added_later_is_trained_and_changes_no_other(make, generator):
    one, late, alone = (nn.Parameter(x) for x in torch.randn(3, 4, 3, generator=generator))
    alone.data.copy_(one.data)
    optimizer, single = make([one], interval=1), make([alone], interval=1)
    quadratic([one], optimizer, steps=3)
    size = late.norm().item()
    optimizer.add_param_group({"params": [late], "lr": 0.01, "meta_lr": 0.1})
    quadratic([one, late], optimizer, steps=5)
    quadratic([alone], single, steps=8)
    assert late.norm().item() < size
    assert_same((one, optimizer.state[one]), (alone, single.state[alone]))


def test_a_group_that_is_refused_is_not_added(generator):
    problem = task(generator)
    optimizer = FOP(problem.params)
    before = kept(optimizer)
    with pytest.raises(ValueError, match="order"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "order": "none"})
    assert_same(kept(optimizer), before)


@every("make", ALL)
def test_to_maximize_is_to_minimize_the_negated_loss(make, generator):
    up = task(generator)
    down = deepcopy(up)
    down.train(optimizer := make(down.params, interval=1), steps=8)
    maximizer = make(up.params, interval=1, maximize=True)
    for _ in range(8):
        up.model.zero_grad()
        (-up.loss()).backward()
        maximizer.step()
    assert_same(up.params, down.params)
    assert_same(learned(maximizer), learned(optimizer))


def test_a_sparse_gradient_is_refused_and_nothing_changes(generator):
    first = nn.Parameter(torch.randn(2, 3, generator=generator))
    layer = nn.Embedding(4, 3, sparse=True)
    optimizer = FOP([("first", first), ("embedding", layer.weight)], lr=0.1)
    (first.sum() + layer(torch.tensor([1, 2])).sum()).backward()
    before = kept(optimizer)
    with pytest.raises(RuntimeError, match=r"dense gradients.*sparse.*'embedding'"):
        optimizer.step()
    assert_same(kept(optimizer), before)


def test_a_complex_parameter_is_refused():
    with pytest.raises(TypeError, match=r"real parameters.*'w'.*complex.*view_as_real"):
        FOP([("w", torch.zeros(2, 2, dtype=torch.complex64, requires_grad=True))], lr=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every("make", ALL)
def test_m_is_in_float32_for_parameters_of_half_precision(make, dtype, generator):
    problem = task(generator, dtype)
    optimizer = make(problem.params, interval=1)
    problem.train(optimizer, steps=3)
    loaded = make(problem.params, interval=1)
    loaded.load_state_dict(resumed(optimizer.state_dict()))
    assert {x.dtype for x in learned(loaded).values()} == {torch.float32}
    assert_same(loaded.state_dict(), optimizer.state_dict())
