"""FOP keeps what PyTorch promises of every optimizer, over the inputs with which PyTorch tests its own."""

import io
import pickle
import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from optim_problems import Task, assert_same, by_precision, kept, task
from problems import every
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from metafop.optim import FOP

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about packages that other tests of PyTorch's would use
    from torch.testing._internal.common_optimizers import (
        OptimizerErrorEnum,
        OptimizerInfo,
        OptimizerInput,
        optim_db,
        optim_error_inputs_func_adamw,
        optim_error_inputs_func_sgd,
        optim_inputs_func_adamw,
        optim_inputs_func_sgd,
    )

pytestmark = pytest.mark.usefixtures("precision")  # PyTorch tests in single precision


class FOPSGD(FOP):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, torch.optim.SGD, **settings)


class FOPAdamW(FOP):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, torch.optim.AdamW, **settings)


def sgd_inputs(device, dtype=None):
    learned = {"interval": 1, "momentum": 0.9, "learn": ("precond", "lr", "momentum")}
    return [
        *optim_inputs_func_sgd(device, dtype),
        OptimizerInput([], {"interval": 1, "lr": 0.01, "momentum": 0.9, "nesterov": True}, "every step"),
        OptimizerInput([], {"preset": "paper", "momentum": 0.9}, "paper"),
        OptimizerInput([], learned, "all learned"),
    ]


def adamw_inputs(device, dtype=None):
    return [
        *optim_inputs_func_adamw(device, dtype),
        OptimizerInput([], {"interval": 1}, "every step"),
        OptimizerInput([], {"interval": 1, "credit": "gradient"}, "through moments"),
        OptimizerInput([], {"interval": 1, "learn": ("precond", "lr")}, "all learned"),
    ]


def info(optimizer_class: Any, base: str, inputs: Any, errors: Any) -> OptimizerInfo:
    own = next(x for x in optim_db if x.name == base)
    return OptimizerInfo(
        optimizer_class,
        optim_inputs_func=inputs,
        optim_error_inputs_func=errors,
        scheduler_inputs=own.scheduler_inputs,
        not_og_supported_flags=own.not_og_supported_flags,
        supported_impls=(),
        supports_complex=False,
    )


INFOS = {
    "sgd": info(FOPSGD, "SGD", sgd_inputs, optim_error_inputs_func_sgd),
    "adamw": info(FOPAdamW, "AdamW", adamw_inputs, optim_error_inputs_func_adamw),
}


@dataclass(frozen=True)
class Case:
    """An optimizer with settings that PyTorch tests, or that are our own."""

    info: OptimizerInfo
    number: int

    @property
    def settings(self) -> dict[str, Any]:
        """Return new ones at every call: a scheduler writes into an lr that is a tensor."""
        return self.info.optim_inputs_func(device="cpu")[self.number].kwargs

    @property
    def maximizes(self) -> bool:
        return self.settings.get("maximize", False)

    def make(self, params: Any, **changed: Any) -> Any:
        return self.info.optim_cls(params, **(self.settings | changed))  # pyright: ignore[reportCallIssue]


CASES = {
    f"{name}: {given.desc}": Case(info, i)
    for name, info in INFOS.items()
    for i, given in enumerate(info.optim_inputs_func(device="cpu"))
}
# For promises that settings have little to do with.
FEW = {name: case for name, case in CASES.items() if name.endswith((": default", ": all learned"))}
MAXIMIZING = {name: case for name, case in CASES.items() if case.maximizes}
MINIMIZING = {name: case for name, case in CASES.items() if not case.maximizes}
ERRORS = {
    f"{name}: {given.optimizer_error_input.desc}": (info.optim_cls, given)
    for name, info in INFOS.items()
    for given in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)  # pyright: ignore
}
NAMED = pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])


class Affine(nn.Module):
    """`W x + b`, with numbers that lie side by side in memory or not."""

    def __init__(self, generator: Generator, contiguous: bool = True) -> None:
        super().__init__()
        weight, bias = torch.randn(10, 5, 2, generator=generator), torch.randn(10, 2, generator=generator)
        parts = (x[..., 0].contiguous() if contiguous else x[..., 0] for x in (weight, bias))
        self.weight, self.bias = (nn.Parameter(x) for x in parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.mv(x) + self.bias


def affine(generator: Generator, contiguous: bool = True) -> Task:
    return Task(Affine(generator, contiguous), torch.randn(5, generator=generator), torch.zeros(10))


def given(task: Task, named: bool) -> Any:
    return task.model.named_parameters() if named else task.model.parameters()


def assert_right_direction(task: Task, optimizer: Any, maximizes: bool, schedulers: Any = ()) -> None:
    first = task.loss().item()
    for _ in range(20):
        loss = task.backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))
    last = task.loss().item()
    assert last > first if maximizes else last < first


@every("optimizer_class, error", ERRORS)
def test_what_torch_refuses_is_refused_in_the_same_words(optimizer_class, error):
    wrong, is_warning = error.optimizer_error_input, issubclass(error.error_type, Warning)
    assert error.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    with (pytest.warns if is_warning else pytest.raises)(error.error_type, match=error.error_regex):
        optimizer_class(wrong.params, **wrong.kwargs)


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@every("case", CASES)
def test_the_loss_goes_the_right_way(case, contiguous, generator):
    problem = affine(generator, contiguous)
    assert problem.params[0].is_contiguous() is contiguous
    assert_right_direction(problem, case.make(problem.params), case.maximizes)


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@every("case", CASES)
def test_the_loss_goes_the_right_way_with_schedulers(case, contiguous, generator):
    for makers in case.info.scheduler_inputs:
        problem = affine(generator, contiguous)
        optimizer = case.make(problem.params)
        assert_right_direction(problem, optimizer, case.maximizes, [make(optimizer) for make in makers])


@every("info", INFOS)
def test_the_loss_of_two_groups_falls_with_schedulers(info, generator):
    for makers in info.scheduler_inputs:
        problem = affine(generator)
        weight, bias = problem.params
        optimizer = info.optim_cls([{"params": [weight]}, {"params": [bias], "lr": 0.01}])
        assert_right_direction(problem, optimizer, False, [make(optimizer) for make in makers])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@every("case", CASES)
def test_a_learning_rate_that_is_a_tensor_is_its_number(case, shape, generator):
    by_number = task(generator)
    by_tensor = deepcopy(by_number)
    by_number.train(case.make(by_number.params, lr=1e-2), steps=12)
    by_tensor.train(case.make(by_tensor.params, lr=torch.full(shape, 1e-2)), steps=12)
    rtol, atol = by_precision(1e-12, 1e-4), by_precision(1e-14, 1e-6)
    torch.testing.assert_close(by_tensor.params, by_number.params, rtol=rtol, atol=atol)


@every("case", CASES)
def test_groups_may_differ_in_weight_decay(case, generator):
    problem = affine(generator)
    weight, bias = problem.params
    groups = [{"params": [weight], **case.settings}, {"params": [bias], **case.settings, "weight_decay": 0.0}]
    for group in groups:
        group.pop("preset", None)
    assert_right_direction(problem, case.info.optim_cls(groups), case.maximizes)


@every("case", CASES)
def test_a_group_with_next_to_no_learning_rate_stays(case, generator):
    problem = affine(generator)
    still = nn.Parameter(torch.randn(2, 3, generator=generator))
    before = still.detach().clone()
    settings = {"lr": 1e-3} | case.settings
    settings.pop("preset", None)
    optimizer = case.info.optim_cls([{"params": problem.params, **settings}, {"params": [still]}], lr=1e-28)
    still.grad = torch.rand(2, 3, generator=generator)
    assert_right_direction(problem, optimizer, case.maximizes)
    assert_same(still, before)


@every("case", CASES)
def test_a_step_without_gradients_changes_nothing(case, generator):
    problem = task(generator)
    optimizer = case.make(problem.params)
    before = kept(optimizer)
    optimizer.step(lambda: torch.ones(1))
    problem.train(optimizer, steps=2)
    optimizer.zero_grad()
    after = kept(optimizer)
    optimizer.step()
    assert before["state"] == {}
    assert_same(kept(optimizer), after)


@every("case", CASES)
def test_zero_gradients_do_not_move_parameters(case, generator):
    problem = task(generator)
    optimizer = case.make(problem.params, weight_decay=0.0)
    before = deepcopy(problem.params)
    for p in problem.params:
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        optimizer.step(lambda: torch.ones(1))
    assert_same(problem.params, before)


@every("case", FEW)
def test_the_printed_optimizer_names_every_setting(case, generator):
    optimizer = case.make(task(generator).params)
    text = repr(optimizer)
    assert [k for k in optimizer.param_groups[0] if k != "params" and f"    {k}: " not in text] == []
    assert text.startswith(type(optimizer).__name__)


@pytest.mark.parametrize("named_after", [False, True], ids=["to unnamed", "to named"])
@NAMED
@every("case", CASES)
def test_a_loaded_state_continues_the_same_bits(case, named, named_after, generator):
    problem = task(generator)
    optimizer = case.make(given(problem, named))
    problem.train(optimizer, steps=8)
    copied = deepcopy(problem)
    loaded = case.make(given(copied, named_after))
    loaded.load_state_dict(deepcopy(optimizer.state_dict()))

    problem.train(optimizer, steps=8)
    copied.train(loaded, steps=8)
    one, other = kept(optimizer), kept(loaded)
    for group in one["param_groups"] + other["param_groups"]:
        group.pop("param_names", None)
    assert_same(other, one)


@every("case", FEW)
def test_repeated_groups_are_written_as_the_group_is(case, generator):
    problem = task(generator)
    optimizer = case.make(problem.params)
    problem.train(optimizer, steps=2)
    once = deepcopy(optimizer.state_dict()["param_groups"][-1])
    optimizer.param_groups.extend(optimizer.param_groups)
    assert_same(optimizer.state_dict()["param_groups"][-1], once)


@every("case", MINIMIZING)
def test_a_state_saved_by_an_older_torch_is_loaded_and_continued(case, generator):
    problem = task(generator)
    optimizer = case.make(problem.params)
    problem.train(optimizer, steps=3)
    copied, old = deepcopy(problem), deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in case.info.not_og_supported_flags:
            group.pop(flag, None)
    loaded = case.make(copied.params)
    loaded.load_state_dict(old)

    problem.train(optimizer, steps=3)
    copied.train(loaded, steps=3)
    # To torch a state without the flag says fused=False; otherwise single precision takes the kernel.
    rtol, atol = by_precision(0, 1e-5), by_precision(0, 1e-6)
    torch.testing.assert_close(copied.params, problem.params, rtol=rtol, atol=atol)


@every("case", MAXIMIZING)
def test_a_maximized_state_saved_by_an_older_torch_still_steps(case, generator):
    problem = task(generator)
    optimizer = case.make(problem.params)
    problem.train(optimizer, steps=3)
    old = deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in case.info.not_og_supported_flags:
            group.pop(flag, None)
    optimizer.load_state_dict(old)
    before = deepcopy(problem.params)
    problem.train(optimizer, steps=1)
    assert not any(torch.equal(x, y) for x, y in zip(problem.params, before, strict=True))


@pytest.mark.parametrize("named_after", [False, True], ids=["to unnamed", "to named"])
@NAMED
@every("case", FEW)
def test_names_outlive_loading(case, named, named_after, generator):
    problem = task(generator)
    optimizer = case.make(given(problem, named))
    problem.train(optimizer, steps=3)
    loaded = case.make(given(problem, named_after))
    loaded.load_state_dict(deepcopy(optimizer.state_dict()))
    problem.train(loaded, steps=1)

    names = [name for name, _ in problem.model.named_parameters()] if named or named_after else None
    assert loaded.state_dict()["param_groups"][0].get("param_names") == names


@NAMED
@every("case", CASES)
def test_a_state_saved_to_a_file_is_the_state(case, named, generator):
    problem = task(generator)
    optimizer = case.make(given(problem, named))
    problem.train(optimizer, steps=3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), optimizer.state_dict())


@every("case", CASES)
def test_a_step_count_that_is_a_number_is_loaded(case, generator):
    problem = task(generator)
    optimizer = case.make(problem.params)
    problem.train(optimizer, steps=3)
    copied, old = deepcopy(problem), deepcopy(optimizer.state_dict())
    for state in old["state"].values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].item()
    loaded = case.make(copied.params)
    loaded.load_state_dict(old)

    problem.train(optimizer, steps=3)
    copied.train(loaded, steps=3)
    assert_same(copied.params, problem.params)


def mark(optimizer: Optimizer) -> None:
    optimizer.state["mark"] = 1  # pyright: ignore


def unmark(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return state_dict | {"marked": state_dict["state"].pop("mark", None)}


@every("case", FEW)
def test_hooks_around_saving_run_in_order(case, generator):
    optimizer = case.make(task(generator).params)
    after = optimizer.register_state_dict_post_hook(unmark)
    alone = optimizer.state_dict()
    after.remove()
    optimizer.register_state_dict_pre_hook(mark)
    before = optimizer.state_dict()
    optimizer.register_state_dict_post_hook(unmark)
    both = optimizer.state_dict()
    assert alone["marked"] is None
    assert before["state"]["mark"] == 1
    assert (both["marked"], both["state"]) == (1, {})


def write_lr(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["lr"] = 0.002


def replace_lr(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    replaced = deepcopy(state_dict)
    replaced["param_groups"][0]["lr"] = 0.003
    return replaced


def record_lr(optimizer: Optimizer) -> None:
    optimizer.state["loaded lr"] = optimizer.param_groups[0]["lr"]  # pyright: ignore


@every("case", FEW)
def test_hooks_before_loading_run_in_order(case, generator):
    optimizer = case.make(task(generator).params)
    state_dict, seen = optimizer.state_dict(), []
    optimizer.register_load_state_dict_pre_hook(write_lr)
    for prepend in (True, False):
        handle = optimizer.register_load_state_dict_pre_hook(replace_lr, prepend=prepend)
        optimizer.load_state_dict(state_dict)
        seen.append(optimizer.param_groups[0]["lr"])
        handle.remove()
    assert seen == [0.002, 0.003]


@every("case", FEW)
def test_hooks_after_loading_see_what_was_loaded(case, generator):
    problem = task(generator)
    optimizer = case.make(problem.params)
    problem.train(optimizer, steps=2)
    optimizer.register_load_state_dict_pre_hook(replace_lr)
    optimizer.register_load_state_dict_post_hook(record_lr)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state["loaded lr"] == 0.003


@every("case", FEW)
def test_hooks_of_one_optimizer_run_until_they_are_removed(case, generator):
    problem = task(generator)
    optimizer, seen = case.make(problem.params), []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    problem.train(optimizer, steps=2)
    for handle in handles:
        handle.remove()
    problem.train(optimizer, steps=1)
    assert seen == ["before", "after"] * 2


@every("case", FEW)
def test_every_hook_runs_once_though_the_base_steps_too(case, generator):
    problem = task(generator)
    optimizer, plain, seen = case.make(problem.params), torch.optim.SGD(problem.params), []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(0)),
        register_optimizer_step_post_hook(lambda *_: seen.append(5)),
    ]
    try:
        for each in (optimizer, plain):
            each.register_step_pre_hook(lambda *_: seen.append(1))
            each.register_step_post_hook(lambda *_: seen.append(2))
        for each in (optimizer, plain, optimizer):
            problem.train(each, steps=1)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [0, 1, 2, 5] * 3


@every("case", FEW)
def test_a_hook_may_change_the_arguments_of_a_step(case, generator):
    optimizer = case.make(task(generator).params)
    optimizer.register_step_pre_hook(lambda me, *_: ((me, lambda: "from the hook"), {}))
    assert optimizer.step() == "from the hook"


@pytest.mark.parametrize(
    "copy", [deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
@every("case", CASES)
def test_a_copy_has_all_public_attributes_and_all_state(case, copy, generator):
    problem = task(generator)
    optimizer = case.make(problem.params)
    problem.train(optimizer, steps=3)
    copied = copy(optimizer)
    assert {k for k in vars(copied) if k[0] != "_"} == {k for k in vars(optimizer) if k[0] != "_"}
    assert_same(copied.state_dict(), optimizer.state_dict())
    assert_same(copied.defaults, optimizer.defaults)


@pytest.mark.parametrize("info", INFOS.values(), ids=INFOS)
def test_an_optimizer_has_the_public_attributes_of_its_base_alone(info, generator):
    params = task(generator).params
    own = {k for k in vars(info.optim_cls(params)) if k[0] != "_"}
    assert own == {k for k in vars(torch.optim.SGD(params)) if k[0] != "_"}


@every("case", CASES)
def test_a_step_with_a_closure_is_the_step_after_it(case, generator):
    with_closure = task(generator)
    without = deepcopy(with_closure)
    optimizer = case.make(with_closure.params)
    losses = [optimizer.step(with_closure.backward) for _ in range(12)]
    assert_same(losses, without.train(case.make(without.params), steps=12))
    assert_same(with_closure.params, without.params)


@every("case", CASES)
def test_no_state_is_empty_after_a_step(case, generator):
    problem = task(generator)
    optimizer = case.make(problem.params)
    problem.train(optimizer, steps=1)
    assert [state for state in optimizer.state.values() if len(state) == 0] == []


@pytest.mark.parametrize("flag", ["foreach", "fused"])
@every("case", CASES)
def test_ways_to_compute_a_step_agree(case, flag, generator):
    """A layer rests for two steps, one step has no gradients, and one parameter is empty."""
    problem = task(generator)
    copied = deepcopy(problem)

    def trained(problem: Task, **flags: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        layer, empty = problem.model[3], nn.Parameter(torch.empty(0))  # pyright: ignore[reportIndexIssue]
        empty.grad = torch.empty(0)
        optimizer = case.make([*problem.params, empty], **flags)
        for i in range(7):
            layer.requires_grad_(i not in (3, 4))
            optimizer.zero_grad()
            if i != 2:
                problem.backward()
            optimizer.step()
        states = optimizer.state_dict()["state"].items()
        return problem.params, {
            f"{i}/{k}": x for i, s in states for k, x in s.items() if isinstance(x, Tensor)
        }

    one, other = trained(problem, foreach=False), trained(copied, **{flag: True})
    rtol, atol = by_precision(1e-12, 1e-4), by_precision(1e-14, 1e-6)
    torch.testing.assert_close(other[0], one[0], rtol=rtol, atol=atol)
    # Only the dtype of Adam's count of steps is the implementation's own affair.
    rtol, atol = by_precision(1e-10, 1e-3), by_precision(1e-13, 1e-5)
    torch.testing.assert_close(other[1], one[1], rtol=rtol, atol=atol, check_dtype=False)


def test_the_inputs_leave_the_choice_of_implementation_to_the_tests():
    flags = {"foreach", "fused", "differentiable"}
    assert [case for case in CASES.values() if flags & case.settings.keys()] == []
