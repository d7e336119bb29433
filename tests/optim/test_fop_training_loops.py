"""What people do in training loops around an optimizer: accumulation, layouts, devices, any base."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from optim_problems import (
    ALL,
    BASES,
    IN_BOTH_PRECISIONS,
    LEARNING,
    Averaging,
    Descent,
    Prepared,
    Task,
    assert_same,
    by_precision,
    learned,
    task,
)
from problems import every, filled
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import clip_grad_norm_

from metafop import Identity
from metafop.optim import FOP


@IN_BOTH_PRECISIONS
@every("make", ALL)
def test_gradients_set_to_zero_or_to_none_train_alike(make, generator):
    to_none = task(generator)
    to_zero = deepcopy(to_none)
    for problem, set_to_none in ((to_none, True), (to_zero, False)):
        optimizer = make(problem.params, interval=1)
        for _ in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            problem.loss().backward()
            optimizer.step()
    assert_same(to_zero.params, to_none.params)


@IN_BOTH_PRECISIONS
@every("make", ALL)
def test_accumulated_and_clipped_gradients_are_taken_as_they_are(make, generator):
    problem = task(generator)
    by_hand = deepcopy(problem)
    optimizer, other = make(problem.params, interval=1), make(by_hand.params, interval=1)

    def halves(problem: Task) -> list[Tensor]:
        pairs = zip(problem.inputs.split(3), problem.targets.split(3), strict=True)
        return [Task(problem.model, x, y).loss() / 2 for x, y in pairs]

    for _ in range(5):
        optimizer.zero_grad()
        for loss in halves(problem):
            loss.backward()
        clip_grad_norm_(problem.params, 0.1)
        optimizer.step()

        parts = [torch.autograd.grad(loss, by_hand.params) for loss in halves(by_hand)]
        for p, first, second in zip(by_hand.params, *parts, strict=True):
            p.grad = first + second
        size = torch.stack([p.grad.norm() for p in by_hand.params]).norm()
        for p in by_hand.params:
            p.grad = p.grad * torch.clamp(0.1 / (size + 1e-6), max=1)
        other.step()
    assert_same(problem.params, by_hand.params)


@IN_BOTH_PRECISIONS
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


@IN_BOTH_PRECISIONS
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


@IN_BOTH_PRECISIONS
@every("make", ALL)
def test_a_model_in_channels_last_trains_alike(make, generator):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 1)
    )
    inputs, targets = torch.randn(4, 3, 6, 6, generator=generator), torch.randn(4, 1, generator=generator)
    usual = Task(filled(model, generator), inputs, targets)
    last = deepcopy(usual)
    last.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    last.inputs = last.inputs.to(memory_format=torch.channels_last)
    assert not last.params[0].is_contiguous()
    usual.train(make(usual.params, interval=1), steps=6)
    last.train(make(last.params, interval=1), steps=6)
    rtol, atol = by_precision(1e-9, 1e-3), by_precision(1e-11, 1e-5)
    torch.testing.assert_close(last.params, usual.params, rtol=rtol, atol=atol)


@IN_BOTH_PRECISIONS
@every("make", LEARNING)
def test_a_compiled_step_is_the_step(make, generator):
    eager = task(generator)
    compiled = deepcopy(eager)
    eager.train(make(eager.params), steps=5)
    optimizer = make(compiled.params)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(5):
        compiled.backward()
        step()
    assert_same(compiled.params, eager.params)


@IN_BOTH_PRECISIONS
@every(
    "make",
    {
        "one from elsewhere": partial(FOP, optimizer_class=Descent),
        "rmsprop": BASES["rmsprop"],
        "adagrad": partial(FOP, optimizer_class=torch.optim.Adagrad, lr=0.1),
        "muon": partial(FOP, optimizer_class=torch.optim.Muon, lr=0.02),
    },
)
def test_any_base_trains(make, generator):
    problem = task(generator)
    matrices = [p for p in problem.params if p.dim() == 2]
    optimizer = make(matrices, interval=1)
    losses = problem.train(optimizer, steps=30)
    assert losses[-1] < 0.5 * losses[0]
    assert all(x.isfinite().all() for x in learned(optimizer).values())


@IN_BOTH_PRECISIONS
def test_a_base_that_makes_its_state_when_it_is_empty_finds_it_empty(generator):
    problem = task(generator)
    plain = deepcopy(problem)
    problem.train(FOP(problem.params, Descent, preconditioner=Identity()), steps=5)
    plain.train(Descent(plain.params), steps=5)
    assert_same(problem.params, plain.params)


@IN_BOTH_PRECISIONS
def test_a_base_that_makes_its_state_before_any_step_keeps_it(generator):
    problem = task(generator)
    plain = deepcopy(problem)
    problem.train(FOP(problem.params, Prepared, preconditioner=Identity()), steps=5)
    plain.train(Prepared(plain.params), steps=5)
    assert_same(problem.params, plain.params)


@IN_BOTH_PRECISIONS
def test_a_base_makes_its_state_for_a_group_that_is_added_later(generator):
    problem = task(generator)
    plain = deepcopy(problem)
    optimizer = FOP(problem.params[:2], Prepared, preconditioner=Identity())
    other = Prepared(plain.params[:2])
    for one, trained in ((optimizer, problem), (other, plain)):
        trained.train(one, steps=3)
        one.add_param_group({"params": trained.params[2:], "lr": 0.01})
        trained.train(one, steps=3)
    assert_same(problem.params, plain.params)


def test_a_base_is_asked_to_train_and_to_be_evaluated(generator):
    problem = task(generator)
    optimizer: Any = FOP(problem.params, Averaging)
    problem.train(optimizer, steps=3)
    before = deepcopy(problem.params)
    optimizer.eval()
    moved = [p - q for p, q in zip(problem.params, before, strict=True)]
    assert_close_to(moved, [optimizer.state[p]["velocity"] for p in problem.params])
    optimizer.train()
    assert_close_to(problem.params, before)


def test_only_around_a_base_with_modes_there_are_modes(generator):
    params = task(generator).params
    for base, has_modes in ((Averaging, True), (Descent, False), (torch.optim.SGD, False)):
        assert [hasattr(FOP(params, base), name) for name in ("train", "eval")] == [has_modes] * 2


def assert_close_to(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def train_random(make: Any, device: str, generator: torch.Generator | None = None) -> Any:
    """Return an optimizer that has stepped with random gradients, where there is a generator."""
    params = [nn.Parameter(torch.ones(shape, device=device)) for shape in ((4, 2, 3, 3), (3, 4), (3,))]
    optimizer = make(params, interval=1, lr=0.0123)  # an lr that no other test has
    for _ in range(4):
        for p in params:
            p.grad = torch.ones_like(p)
            if generator is not None:
                p.grad.normal_(generator=generator)
        optimizer.step()
    return optimizer


@IN_BOTH_PRECISIONS
@pytest.mark.parametrize("default", ["cpu", "meta"])
@every("make", ALL)
def test_parameters_on_the_meta_device_take_steps_and_are_learned_from(make, default):
    with torch.device(default):
        optimizer = train_random(make, "meta")
    states = [state for state in optimizer.state.values() if "fop_m0" in state]
    assert [state["fop_updates"] for state in states] == [3, 3]
    assert {state["fop_m0"].device.type for state in states} == {"meta"}


@IN_BOTH_PRECISIONS
@every("make", BASES)
def test_steps_of_fake_tensors_leave_no_trace_in_later_ones(make, generator):
    with FakeTensorMode():
        fake = train_random(make, "cpu")
    assert [state["fop_updates"] for state in fake.state.values() if "fop_m0" in state] == [3, 3]
    optimizer = train_random(make, "cpu", generator)
    assert all(p.isfinite().all() for p in optimizer.state)


@IN_BOTH_PRECISIONS
@every("make", {name: make for name, make in ALL.items() if "adamw" not in name})  # torch's AdamW fails
def test_the_default_device_changes_no_step_and_leaves_no_trace(make, generator):
    copied = torch.Generator()
    copied.set_state(generator.get_state())
    with torch.device("meta"):
        one = train_random(make, "cpu", generator)
    other = train_random(make, "cpu", copied)
    assert_same(one.param_groups[0]["params"], other.param_groups[0]["params"])
    assert_same(learned(one), learned(other))
