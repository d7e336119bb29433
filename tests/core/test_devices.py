"""Training stays on the device of the parameters; what is on two devices is refused in one sentence."""

import pytest
import torch
from fake_gpu import (
    GPU,
    META,
    NEEDS_CUDA,
    ON_A_DEVICE_WITHOUT_NUMBERS,
    FakeGPU,
    devices,
    like,
    mode,
    moved_to,
)
from problems import ALL_MODELS, FAMILIES, OPTIMIZERS, assert_clear, assert_near, convnet, every, mlp
from torch import nn
from torch.nn.functional import mse_loss

import metafop
from metafop import SGD, Adam, Dense, Momentum, Online, Scheduled, Tasks, Training, diagnostics, functional


@every("setting", OPTIMIZERS)
def test_an_optimizer_steps_and_is_learned_on_the_device(setting, generator):
    problem = mlp(generator)
    with FakeGPU():
        problem = moved_to(problem, GPU)
        training = problem.training(setting.optimizer)
        meta = training.init_meta(problem.params, **setting.values)
        assert_stays(Online(training, Adam(), learn=("lr",)), meta, problem)


@every("family", FAMILIES)
def test_a_preconditioner_steps_and_is_learned_on_the_device(family, generator):
    problem = convnet(generator)
    with FakeGPU():
        problem = moved_to(problem, GPU)
        training = problem.training(Momentum(), family)
        meta = training.init_meta(problem.params, generator, lr=0.1, momentum=0.9)
        has_numbers = any(map(metafop.tree.leaves, meta.precond.values()))
        learn = ("precond", "momentum") if has_numbers else ("lr",)
        assert_stays(Online(training, SGD(), learn=learn), meta, problem)


def assert_stays(online, meta, problem):
    """Two steps, the second of which learns, leave everything on the device."""
    training, outer_meta = online.training, online.init_meta(meta, lr=0.1)
    state, info = online.init(meta, training.init(problem.params, problem.buffers)), {}
    for batch in problem.batches[:2]:
        state, info = online.step(outer_meta, state, batch)
    assert devices((meta, outer_meta, state, info)) == {GPU}


@every("make", ALL_MODELS)
def test_a_model_trains_on_the_device(make, generator):
    problem = make(generator)
    with FakeGPU():
        problem = moved_to(problem, GPU)
        training = problem.training(SGD())
        carry, info = training.init(problem.params, problem.buffers), {}
        meta = training.init_meta(problem.params, lr=0.1)
        for batch in problem.batches[:2]:
            carry, info = training.step(meta, carry, batch)
        assert devices((meta, carry, info)) == {GPU}


@ON_A_DEVICE_WITHOUT_NUMBERS
def test_all_that_is_learned_besides_stays_on_the_device(device, generator):
    problem = mlp(generator)

    def penalized(params, buffers, batch, leaves):
        value, buffers = problem.loss(params, buffers, batch)
        return value + leaves["l2"] * sum(p.square().sum() for p in params.values()), buffers

    with mode(device):
        there = moved_to(problem, device)
        training = Training(penalized, Scheduled(Adam(), 3), {"0.weight": Dense()})
        meta = training.init_meta(there.params, loss={"l2": 0.1}, lr=0.1)
        online = Online(
            training,
            Adam(),
            learn=("lr", "loss"),
            null_step=True,
            bounds=(metafop.safeguards.bound_norm(1),),
        )
        state = online.init(meta, training.init(there.params), there.batches[0])
        state, info = online.step(online.init_meta(meta, lr=0.1), state, there.batches[0])
        each = Training(problem.loss, Adam())
        tasks, batches = Tasks(each, 2), metafop.tree.stack(there.batches[:2])
        carry, _ = tasks.step(each.init_meta(there.params, lr=0.1), tasks.init(there.params), batches)
        assert devices((state, info, carry)) == {device}


@ON_A_DEVICE_WITHOUT_NUMBERS
def test_what_a_seeded_loss_draws_is_on_the_device(device):
    loss, params, buffers = functional.from_module(dropping(), noisy, seeded=True)
    with mode(device):
        params, buffers, batch = like((params, buffers, torch.ones(4, 3)), device)
        training = Training(loss, SGD())
        meta, carry = training.init_meta(params, lr=0.1), training.init(params, buffers)
        online = Online(training, SGD(), learn=("lr",))
        state, _ = online.step(online.init_meta(meta, lr=0.1), online.init(meta, carry), batch)
        assert devices(state) == {device}


def test_the_seed_is_where_the_module_is_and_may_be_on_the_cpu():
    loss, params, buffers = functional.from_module(dropping(device="meta"), noisy, seeded=True)
    assert devices((params, buffers)) == {META}
    value, after = loss(params, {"seed": torch.tensor(7)}, torch.ones(4, 3, device="meta"))
    assert devices((value, after)) == {META, torch.device("cpu")}


def dropping(device="cpu"):
    return nn.Sequential(nn.Linear(3, 2, device=device), nn.Dropout(0.5))


def noisy(model, batch):
    return mse_loss(model(batch + torch.randn_like(batch)), batch[:, :2])


def test_a_seeded_loss_may_draw_on_the_cpu():
    def noisy(params, batch):
        return mse_loss(params["w"] * batch, torch.rand(2, device="cpu").to(batch))

    with FakeGPU():
        seed, batch = like((torch.tensor(0), torch.ones(2)), GPU)
        loss = functional.plain(noisy, seeded=True)
        assert devices(loss({"w": batch}, {"seed": seed}, batch)) == {GPU}


@ON_A_DEVICE_WITHOUT_NUMBERS
def test_diagnostics_read_no_number(device, generator):
    problem = convnet(generator)
    with mode(device):
        problem = moved_to(problem, device)
        training = Training(problem.loss, SGD(), metafop.assign(problem.params))
        meta = training.init_meta(problem.params, generator, lr=0.1)
        found = diagnostics.summary(training, meta, problem.params)
        assert devices(found | diagnostics.whitening(training, meta, problem.params)) == {device}


def test_a_state_that_is_moved_trains_on(generator, tmp_path):
    problem = convnet(generator)
    training = problem.training(Adam(), Dense())
    online = Online(training, Adam())
    meta = training.init_meta(problem.params, lr=0.1)
    outer_meta = online.init_meta(meta, lr=0.1)
    state, _ = online.step(
        outer_meta, online.init(meta, training.init(problem.params, problem.buffers)), problem.batches[0]
    )
    torch.save((outer_meta, state), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", map_location="meta", weights_only=True)
    moved = metafop.tree.map(lambda x: x.to("meta"), (outer_meta, state))
    for there_meta, there in (loaded, moved):
        after, _ = online.step(there_meta, there, like(problem.batches[1], META))
        assert devices((there_meta, there, after)) == {META}


def test_parameters_on_two_devices_are_refused(generator):
    problem = mlp(generator)
    params = problem.params | {"0.bias": problem.params["0.bias"].to("meta")}
    for act in (
        problem.training(SGD()).init,
        lambda params: problem.training(SGD()).init_meta(params, lr=0.1),
    ):
        assert_clear(lambda act=act: act(params), ["'0.weight'", "cpu", "'0.bias'", "meta", "model.to("])


def test_a_meta_on_another_device_than_the_parameters_is_refused(generator):
    problem = mlp(generator)
    training = problem.training(SGD(), Dense())
    meta, carry = training.init_meta(problem.params, lr=0.1), training.init(problem.params)
    elsewhere = meta._replace(precond=like(meta.precond, META))
    online = Online(training, SGD())
    words = ["precond.0.weight", "meta", "cpu", "x.to('cpu')"]
    assert_clear(lambda: training.check(elsewhere, carry), words)
    assert_clear(lambda: online.init(elsewhere, carry), words)
    outer_meta = like(online.init_meta(meta, lr=0.1), META)
    assert_clear(lambda: online.check(outer_meta, online.init(meta, carry)), ["hyper.lr", "meta", "cpu"])


@pytest.mark.parametrize("make", [mlp, convnet], ids=["linear", "convolution"])
def test_a_batch_on_another_device_than_the_parameters_is_refused(make, generator):
    problem = make(generator)
    training = problem.training(SGD())
    params, buffers = like((problem.params, problem.buffers), META)
    meta, carry = training.init_meta(params, lr=0.1), training.init(params, buffers)
    words = ["batch", str(tuple(problem.batches[0][0].shape)), "cpu", "meta", ".to('meta')"]
    assert_clear(lambda: training.step(meta, carry, problem.batches[0]), words)
    online = Online(training, SGD(), learn=("lr",))
    outer_meta, state = online.init_meta(meta, lr=0.1), online.init(meta, carry)
    assert_clear(lambda: online.step(outer_meta, state, problem.batches[0]), words)


def test_a_single_number_on_the_cpu_goes_with_any_device():
    loss = functional.plain(lambda params, batch: batch * params["w"].square().sum())
    training, params = Training(loss, SGD()), {"w": torch.ones(2, device="meta")}
    carry, _ = training.step(training.init_meta(params, lr=0.1), training.init(params), torch.tensor(0.5))
    assert devices(carry) == {META}


@NEEDS_CUDA
def test_a_gpu_gives_the_numbers_of_the_cpu_and_its_state_goes_on_there(generator, tmp_path):
    problem = convnet(generator)
    training = Training(problem.loss, Momentum(), metafop.assign(problem.params))
    online = Online(training, Adam(), learn=("precond", "lr"))
    meta = training.init_meta(problem.params, generator, lr=0.1)
    given = (
        online.init_meta(meta, lr=0.1),
        online.init(meta, training.init(problem.params, problem.buffers)),
    )
    ends = {}
    for device in ("cpu", "cuda"):
        outer_meta, state = metafop.tree.map(lambda x, device=device: x.to(device), given)
        for batch in problem.batches:
            batch = metafop.tree.map(lambda x, device=device: x.to(device), batch)
            state, _ = online.step(outer_meta, state, batch)
        torch.save(state, tmp_path / "state.pt")
        ends[device] = torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True)
    assert_near(ends["cuda"], ends["cpu"], rtol=1e-6)
    state, _ = online.step(given[0], ends["cuda"], problem.batches[0])
    assert devices(state) == {torch.device("cpu")}
