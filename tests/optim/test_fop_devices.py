"""FOP steps, learns, and loads its state on the device of the parameters."""

import pytest
import torch
from fake_gpu import GPU, META, NEEDS_CUDA, FakeGPU, devices
from optim_problems import ALL, IN_BOTH_PRECISIONS, MOMENTUM, task
from problems import FAMILIES, assert_near, every
from torch import nn

from metafop.optim import FOP

SHAPES = [(2, 1, 3, 3), (2,), (5, 8), ()]
ON_THE_CPU = {"step", "fop_held_time"}  # torch keeps Adam's count of steps there


def trained(make, device, steps=3, **settings):
    """An optimizer that has learned on a device without numbers."""
    params = [nn.Parameter(torch.empty(shape, device=device)) for shape in SHAPES]
    optimizer = make(params, **settings)
    for _ in range(steps):
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step()
    return optimizer


def places(optimizer):
    """Where the tensors of a state are, but for those that torch keeps on the CPU."""
    saved = optimizer.state_dict()
    entries = [{k: x for k, x in state.items() if k not in ON_THE_CPU} for state in saved["state"].values()]
    return devices((entries, saved["param_groups"]))


@IN_BOTH_PRECISIONS
@every("make", ALL)
def test_every_entry_of_the_state_is_on_the_device(make):
    with FakeGPU():
        optimizer = trained(make, GPU, interval=1)
        assert places(optimizer) == {GPU}
        other = trained(make, GPU, steps=0, interval=1)
        other.load_state_dict(optimizer.state_dict())
        other.step()
        assert places(other) == {GPU}


@every("family", FAMILIES)
def test_every_preconditioner_is_learned_on_the_device(family):
    shapes = {"kernel": (4, 2, 3, 3), "stacked": (3, 2, 2)}
    with FakeGPU():
        params = [(name, nn.Parameter(torch.empty(shape, device=GPU))) for name, shape in shapes.items()]
        optimizer = FOP(params, preconditioner=family, interval=1, **MOMENTUM)
        for _ in range(3):
            for _, p in params:
                p.grad = torch.empty_like(p)
            optimizer.step()
        assert places(optimizer) == {GPU}


@every("make", ALL)
def test_a_state_that_was_saved_on_a_cpu_is_loaded_where_the_parameters_are(make, generator, tmp_path):
    problem = task(generator)
    optimizer = make(problem.params, interval=1)
    problem.train(optimizer, steps=3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    params = [nn.Parameter(p.detach().to(META)) for p in problem.params]
    for map_location in ("cpu", "meta"):
        loaded = make(params, interval=1)
        loaded.load_state_dict(
            torch.load(tmp_path / "state.pt", map_location=map_location, weights_only=True)
        )
        assert places(loaded) == {META}


@NEEDS_CUDA
@pytest.mark.parametrize("interval", [1, 2])
@every("make", ALL)
def test_a_gpu_takes_the_steps_of_the_cpu_and_its_state_is_loaded_there(make, interval, generator, tmp_path):
    problem = task(generator)
    start = problem.model.state_dict()
    ends = {}
    for device in ("cpu", "cuda"):
        there = task(generator)
        there.model.load_state_dict(start)
        there.model.to(device)
        there.inputs, there.targets = problem.inputs.to(device), problem.targets.to(device)
        optimizer = make(there.params, interval=interval)
        there.train(optimizer, steps=5)
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        ends[device] = {name: p.detach().cpu() for name, p in there.model.named_parameters()}
    assert_near(ends["cuda"], ends["cpu"], rtol=1e-6)
    optimizer = make(problem.params, interval=interval)
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    problem.train(optimizer, steps=2)
    assert places(optimizer) == {torch.device("cpu")}
