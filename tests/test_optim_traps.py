"""FOP stays out of the traps that catch optimizers in real training: checkpoints, precision, failures."""

import io
import pickle
import re
import sys
from copy import deepcopy
from functools import partial
from typing import Any, cast

import pytest
import torch
from optim_problems import BASES, LEARNING, Task, assert_same, kept, task
from problems import every, filled
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from metafop import Dense, Diagonal, Identity, LowRank, Spatial
from metafop.optim import FOP

ALL = BASES | LEARNING
RESUMED = {name: make for name, make in ALL.items() if name != "sgd"}
ZEROS = {"number": lambda: 0.0, "tensor": lambda: torch.tensor(0.0)}


class Descent(Optimizer):
    """A base from elsewhere: it makes its state when it finds none, and it may fail."""

    fails = False

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("the base has failed")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["velocity"] = torch.zeros_like(p)
                state["velocity"].mul_(0.5).add_(p.grad)
                p.sub_(state["velocity"], alpha=group["lr"])


def learned(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every m, the offsets of learned settings, and what the meta-optimizer holds for them."""
    return {
        f"{where} {i} {k}": x.clone()
        for where, pattern, dicts in (
            ("state", r"fop_(m|meta)\d+(_\d+)?", optimizer.state.values()),
            ("group", r"fop_(lr|momentum)(_\d+)?", optimizer.param_groups),
        )
        for i, entries in enumerate(dicts)
        for k, x in entries.items()
        if re.fullmatch(pattern, k)
    }


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


def resumed(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return what a file holds of a state."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


@pytest.mark.parametrize("steps", [3, 4, 5])
@pytest.mark.parametrize("interval", [1, 3])
@every("make", {name: make for name, make in ALL.items() if name != "rmsprop"})
def test_a_step_that_failed_can_be_repeated(make, interval, steps, generator, monkeypatch):
    problem = task(generator)
    other = deepcopy(problem)
    optimizer, plain = make(problem.params, interval=interval), make(other.params, interval=interval)
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


# Schedules, accumulation, layouts, compilation

SCHEDULES = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=12),
}
# OneCycleLR also cycles momentum, or beta1.
PLAIN = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def scheduled(problem: Task, optimizer: Any, schedule: Any) -> list[float]:
    """Return the learning rates that the scheduler has set."""
    scheduler, rates = schedule(optimizer), []
    for _ in range(10):
        problem.train(optimizer, steps=1)
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


@every("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PLAIN)
def test_a_scheduler_sets_what_it_would_set_for_the_base(name, schedule, generator):
    problem = task(generator)
    other, third = deepcopy(problem), deepcopy(problem)
    rates = scheduled(problem, PLAIN[name](problem.params), schedule)
    without_p = BASES[name](other.params, preconditioner=Identity())
    with_p = LEARNING[f"{name}, learned"](third.params)
    assert scheduled(other, without_p, schedule) == rates
    assert_same(other.params, problem.params)
    assert scheduled(third, with_p, schedule) == rates


@every("schedule", SCHEDULES)
def test_a_learned_lr_multiplies_what_the_scheduler_sets(schedule, generator):
    problem = task(generator)
    weight = problem.params[-2]
    optimizer = FOP(problem.params, lr=0.05, preconditioner=Identity(), learn=("lr",), meta_lr=0.05)
    scheduler, used, expected = schedule(optimizer), [], []
    optimizer.param_groups[0]["momentum"] = 0  # OneCycleLR has set it
    for _ in range(10):
        before = weight.detach().clone()
        lr = optimizer.param_groups[0]["lr"]
        problem.train(optimizer, steps=1)
        used.append((before - weight.detach()).norm() / weight.grad.norm())
        expected.append(lr * optimizer.param_groups[0]["fop_lr_offset"].exp())
        scheduler.step()
        optimizer.param_groups[0]["momentum"] = 0
    torch.testing.assert_close(used, expected, rtol=1e-11, atol=0)
    assert optimizer.param_groups[0]["fop_lr_offset"].abs().item() > 0.01


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
    torch.testing.assert_close(last.params, usual.params, rtol=1e-9, atol=1e-11)


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


# Saving and loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every("make", RESUMED)
def test_training_resumed_from_a_file_is_training_that_never_stopped(make, dtype, generator):
    problem = task(generator, dtype)
    optimizer = make(problem.params, interval=3)
    problem.train(optimizer, steps=4)
    copied = deepcopy(problem)
    loaded = make(copied.params, interval=3)
    loaded.load_state_dict(resumed(optimizer.state_dict()))

    problem.train(optimizer, steps=7)
    copied.train(loaded, steps=7)
    assert_same(kept(loaded), kept(optimizer))


@pytest.mark.parametrize("name", PLAIN)
def test_the_state_of_the_base_alone_is_loaded_and_p_starts_fresh(name, generator):
    problem = task(generator)
    plain = PLAIN[name](problem.params)
    problem.train(plain, steps=4)
    copied, fresh = deepcopy(problem), deepcopy(problem)
    optimizer = BASES[name](copied.params, preconditioner=Dense(), interval=1)
    optimizer.load_state_dict(resumed(plain.state_dict()))
    other = BASES[name](fresh.params, preconditioner=Dense(), interval=1)

    copied.train(optimizer, steps=1)
    problem.train(plain, steps=1)
    fresh.train(other, steps=1)
    torch.testing.assert_close(copied.params, problem.params, rtol=1e-12, atol=1e-14)  # P starts as I
    assert_same(learned(optimizer), learned(other))
    losses = copied.train(optimizer, steps=8)
    assert losses[-1] < losses[0]


def two_groups(problem: Task) -> list[dict[str, Any]]:
    return [{"params": problem.params[:2]}, {"params": problem.params[2:]}]


def wider(problem: Task) -> list[Tensor]:
    return [nn.Parameter(torch.ones(*[n + 1 for n in p.shape])) for p in problem.params]


REFUSED = {
    "other groups": (two_groups, {}, r"groups of \[2, 4\] parameters.*groups of \[6\].*same groups"),
    "another preconditioner": (lambda x: x.params, {"preconditioner": Diagonal()}, r"Diagonal.*'fop'"),
    "another model": (wider, {}, "for the same model"),
    "another order": (lambda x: x.params[::-1], {}, "for the same model"),
}


@every("params, settings, message", REFUSED)
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(name, params, settings, message, generator):
    problem = task(generator)
    optimizer = BASES[name](problem.params, interval=1)
    copied = deepcopy(problem)
    twin = BASES[name](copied.params, interval=1)
    problem.train(optimizer, steps=3)
    copied.train(twin, steps=3)
    other = BASES[name](params(deepcopy(problem)), interval=1, **settings)
    for group in other.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    other.step()
    before = kept(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(other.state_dict())
    assert_same(kept(optimizer), before)

    problem.train(optimizer, steps=3)
    copied.train(twin, steps=3)
    assert_same(kept(optimizer), kept(twin))


# The state is what optimizer.state holds, whoever wrote it


@every("make", ALL)
def test_tensors_of_the_state_may_be_replaced_by_equal_ones(make, generator):
    problem = task(generator)
    other = deepcopy(problem)
    optimizer, plain = make(problem.params, interval=1), make(other.params, interval=1)
    for _ in range(3):
        problem.train(optimizer, steps=2)
        for state in optimizer.state.values():
            for key, x in state.items():
                state[key] = x.clone() if isinstance(x, Tensor) else x
    other.train(plain, steps=6)
    assert_same(kept(optimizer), kept(plain))


@every("make", ALL)
def test_an_m_written_into_the_state_is_the_one_that_is_used(make, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=3)
    problem.train(optimizer, steps=4)
    copied = deepcopy(problem)
    loaded = make(copied.params, interval=3)
    changed = resumed(optimizer.state_dict())
    for states in (optimizer.state, changed["state"]):
        for state in states.values():
            if "fop_m0" in state:
                state["fop_m0"] = 0.5 * state["fop_m0"]
    loaded.load_state_dict(changed)

    problem.train(optimizer, steps=1)
    copied.train(loaded, steps=1)
    assert_same(copied.params, problem.params)


@every("make", BASES)
def test_a_state_that_is_cleared_starts_anew(make, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=1)
    problem.train(optimizer, steps=3)
    copied = deepcopy(problem)
    fresh = make(copied.params, interval=1)
    optimizer.state.clear()
    problem.train(optimizer, steps=4)
    copied.train(fresh, steps=4)
    assert_same(problem.params, copied.params)
    for one in (optimizer, fresh):
        for entry in one.state.values():
            entry.pop("fop_next", None)  # the step of the group in which to learn next
    assert_same(optimizer.state_dict()["state"], fresh.state_dict()["state"])


# Settings that change in the middle of training


@every(
    "make, changed",
    {
        "momentum, from nothing": (BASES["sgd"], {"momentum": 0.9}),
        "momentum, to nothing": (BASES["momentum"], {"momentum": 0.0}),
        "nesterov, from now on": (BASES["momentum"], {"nesterov": True}),
        "nesterov, no longer": (BASES["nesterov"], {"nesterov": False}),
        "dampening, from now on": (BASES["momentum"], {"dampening": 0.1}),
        "amsgrad, no longer": (partial(BASES["adamw"], amsgrad=True), {"amsgrad": False}),
        "credit": (BASES["momentum"], {"credit": "gradient"}),
        "adamw's credit": (BASES["adamw"], {"credit": "gradient"}),
        "order": (BASES["adamw"], {"order": "paper"}),
        "scale_free": (BASES["momentum"], {"scale_free": False}),
        "interval": (BASES["momentum"], {"interval": 2}),
        "learn": (BASES["momentum"], {"learn": ("precond", "lr", "momentum")}),
        "learn no more": (LEARNING["adamw, learned"], {"learn": ("precond",)}),
    },
)
def test_training_goes_on_when_a_setting_changes(make, changed, generator):
    problem = task(generator)
    optimizer = make(problem.params, interval=1)
    losses = problem.train(optimizer, steps=3)
    optimizer.param_groups[0].update(changed)
    losses += problem.train(optimizer, steps=6)
    assert losses[-1] < losses[0]


# What is refused at the door


def refused(*args: Any, **settings: Any) -> Any:
    return lambda params: FOP(params, *args, **settings)


MISTAKES = {
    "order": (refused(order="none"), ValueError, ["order", "'none'", "'exact'", "'paper'"]),
    "credit": (refused(credit="none"), ValueError, ["credit", "'none'", "'velocity'", "'gradient'"]),
    "preset": (refused(preset="best"), ValueError, ["preset", "'best'", "'default'", "'paper'"]),
    "interval": (refused(interval=0), ValueError, ["interval", "0", "whole number"]),
    "fraction of an interval": (refused(interval=1.5), ValueError, ["interval", "1.5", "whole number"]),
    "meta_lr": (refused(meta_lr=-1), ValueError, ["meta_lr", "-1", "1e-3"]),
    "endless meta_lr": (refused(meta_lr=float("inf")), ValueError, ["meta_lr", "inf", "1e-3"]),
    "meta_lr of nan": (refused(meta_lr=float("nan")), ValueError, ["meta_lr", "nan", "1e-3"]),
    "learn": (refused(learn=("x",)), ValueError, ["learns", "('x',)", "precond"]),
    "learn nothing": (refused(learn=()), ValueError, ["learns", "()", "precond"]),
    "learn by letters": (refused(learn="lr"), ValueError, ["learns", "'lr'", "precond"]),
    "differentiable": (refused(differentiable=True), ValueError, ["differentiable=True", "hypergradients"]),
    "preconditioner": (refused(preconditioner="best"), TypeError, ["'best'", "'fop-norm'", "LowRank(8)"]),
    "preconditioner's class": (refused(preconditioner=LowRank), TypeError, ["LowRank", "family"]),
    "instance": (
        lambda params: FOP(params, cast(Any, torch.optim.SGD(params, lr=0.1))),
        TypeError,
        ["class of an optimizer", "torch.optim.SGD"],
    ),
    "not an optimizer": (refused(nn.Linear), TypeError, ["class of an optimizer", "Linear"]),
    "lbfgs": (refused(torch.optim.LBFGS), TypeError, ["LBFGS", "another optimizer"]),
    "patterns without names": (
        refused(preconditioner={"*": Dense()}),
        ValueError,
        ["['*']", "without names", "named_parameters"],
    ),
    "lr of rmsprop": (refused(torch.optim.RMSprop, learn=("lr",)), ValueError, ["lr of RMSprop", "AdamW"]),
    "lr with dampening": (
        refused(momentum=0.9, dampening=0.1, learn=("lr",)),
        ValueError,
        ["lr of SGD", "dampening"],
    ),
    "momentum of zero": (
        refused(learn=("momentum",)),
        ValueError,
        ["momentum", "above zero", "momentum=0.9"],
    ),
    "momentum of adamw": (refused(torch.optim.AdamW, learn=("momentum",)), ValueError, ["momentum", "AdamW"]),
    "base's own": (refused(momentum=-1.0), ValueError, ["Invalid momentum value: -1.0"]),
    "unknown setting": (refused(momentun=0.9), TypeError, ["momentun"]),
}


@every("make, error, words", MISTAKES)
def test_a_mistake_is_named_with_its_value_and_its_remedy(make, error, words, generator):
    with pytest.raises(error) as raised:
        make(task(generator).params)
    assert [word for word in words if word not in str(raised.value)] == []


def test_a_parameter_that_its_preconditioner_cannot_take_is_named(generator):
    model = task(generator).model
    with pytest.raises(ValueError, match=r"'0\.bias'.*Spatial"):
        FOP(model.named_parameters(), lr=0.1, preconditioner=Spatial())


# Bases of every kind


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


def test_a_base_that_makes_its_state_when_it_is_empty_finds_it_empty(generator):
    problem = task(generator)
    plain = deepcopy(problem)
    problem.train(FOP(problem.params, Descent, preconditioner=Identity()), steps=5)
    plain.train(Descent(plain.params), steps=5)
    assert_same(problem.params, plain.params)
