"""Losses made from modules: their buffers, tied and frozen parameters, and what is refused."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from problems import OPTIMIZERS, assert_near, assert_same_bits, batch_loss, convnet, every, filled, mlp, moved
from torch import nn
from torch.func import grad, vmap

from metafop import SGD, Training, functional, tree

SETTINGS = {k: OPTIMIZERS[k] for k in ("sgd", "nesterov, decayed", "adam, decayed")}


def trained(model, setting, batches, loss=batch_loss):
    """Return the parameters and buffers after our training, and after torch's."""
    pure, params, buffers = functional.from_module(model, loss)
    training = Training(pure, setting.optimizer)
    meta, carry = training.init_meta(params, **setting.hyper()._asdict()), training.init(params, buffers)
    ordinary = copy.deepcopy(model)
    optimizer = setting.twin([p for p in ordinary.parameters() if p.requires_grad])
    for batch in batches:
        carry, _ = training.step(meta, carry, batch)
        optimizer.zero_grad()
        loss(ordinary, batch).backward()
        optimizer.step()
    state = ordinary.state_dict()
    theirs = {k: state[k] for k in params}, {k: state[k] for k in buffers}
    return (carry.params, carry.buffers), theirs


def test_plain_hands_buffers_on_as_they_are():
    buffers = {"seen": torch.ones(2)}
    value, after = functional.plain(lambda params, batch: params["w"] * batch)(
        {"w": torch.tensor(3.0)}, buffers, torch.tensor(2.0)
    )
    assert value == 6.0
    assert after is buffers


def test_a_loss_has_the_modules_value_and_copies_of_its_tensors(generator):
    problem = convnet(generator)
    value, _ = problem.loss(problem.params, problem.buffers, problem.batches[0])
    assert_same_bits(value, batch_loss(copy.deepcopy(problem.model), problem.batches[0]).detach())
    own = {t.data_ptr() for t in problem.model.state_dict().values()}
    assert not own & {t.data_ptr() for t in (problem.params | problem.buffers).values()}
    assert set(problem.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@every("setting", SETTINGS)
def test_batch_norm_trains_as_in_the_ordinary_way(setting, generator):
    problem = convnet(generator)
    ours, theirs = trained(problem.model, setting, problem.batches)
    assert_near(ours, theirs, rtol=1e-12)


@every("setting", SETTINGS)
def test_a_model_may_be_called_more_than_once_in_a_loss(setting, generator):
    problem = convnet(generator)

    def twice(model, batch):
        inputs, labels = batch
        return batch_loss(model, (inputs, labels)) + 0.5 * batch_loss(model, (inputs.flip(0) + 0.1, labels))

    ours, theirs = trained(problem.model, setting, problem.batches, twice)
    assert_near(ours, theirs, rtol=1e-12)


def test_batch_norm_in_eval_mode_keeps_its_statistics(generator):
    problem = convnet(generator)
    problem.model.get_submodule("1").eval()
    (params, buffers), theirs = trained(problem.model, OPTIMIZERS["sgd"], problem.batches)
    assert_same_bits(buffers, problem.buffers)
    assert_near(params, theirs[0], rtol=1e-12)


def test_statistics_over_all_batches_need_a_count_as_a_python_number_and_are_refused():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=None))
    with pytest.raises(ValueError, match=r"BatchNorm1d.*momentum, such as 0\.1"):
        functional.from_module(model, batch_loss)
    functional.from_module(model.eval(), batch_loss)


def test_what_becomes_of_the_module_later_does_not_change_the_loss(generator):
    model = filled(nn.Sequential(nn.Linear(3, 2), nn.Dropout()), generator).eval()
    loss, params, buffers = functional.from_module(model, batch_loss)
    batch = mlp(generator).batches[0]
    before = loss(params, buffers, batch)
    model.train()
    filled(model, generator)
    assert_near(loss(params, buffers, batch), before, 0.0)


def test_parameters_of_other_names_are_refused(generator):
    loss, params, buffers = functional.from_module(nn.Linear(3, 2), batch_loss)
    with pytest.raises(ValueError, match="must not change"):
        loss({"weights": params["weight"], "bias": params["bias"]}, buffers, mlp(generator).batches[0])


def test_buffers_are_carried_and_never_differentiated():
    def loss(params, buffers, batch):
        return params["w"] * batch, {"seen": buffers["seen"] + params["w"]}

    def seen(w):
        training = Training(loss, SGD())
        meta, carry = (
            training.init_meta({"w": w}, lr=0.1),
            training.init({"w": w}, {"seen": torch.tensor(1.0)}),
        )
        return training.evaluate(meta, carry, 2.0).buffers["seen"]

    assert seen(torch.tensor(3.0)) == 4.0
    assert grad(seen)(torch.tensor(3.0)) == 0.0


class Average(nn.Module):
    """Assigns to its buffer, where batch norm writes into it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs):
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs * self.weight - self.mean


def test_a_buffer_that_is_assigned_to_is_carried_too(generator):
    ours, theirs = trained(Average(), OPTIMIZERS["sgd"], mlp(generator).batches)
    assert_near(ours, theirs, rtol=1e-12)


class Counter(nn.Module):
    """The loss grows with a count of its calls, which it writes into or, if it says so, assigns to."""

    count: torch.Tensor
    odd: torch.Tensor

    def __init__(self, assigns):
        super().__init__()
        self.assigns, self.weight = assigns, nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("odd", torch.tensor(False))

    def forward(self, inputs):
        if self.assigns:
            self.count, self.odd = self.count + 1, ~self.odd
        else:
            self.count += 1
            self.odd.logical_not_()
        return self.weight * inputs * self.count**2 + self.odd


class Queue(nn.Module):
    """Keeps the last means of its inputs in a ring, written at an integer position."""

    ring: torch.Tensor
    at: torch.Tensor

    def __init__(self, reads):
        super().__init__()
        self.reads, self.weight = reads, nn.Parameter(torch.ones(3))
        self.register_buffer("ring", torch.zeros(3, 3))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

    def forward(self, inputs):
        mean = inputs.detach().mean(0)
        if self.reads:
            self.ring[int(self.at)] = mean
        else:
            self.ring.copy_(torch.where(torch.arange(3)[:, None] == self.at, mean, self.ring))
        self.at[0] = (self.at[0] + 1) % 3
        return (inputs * self.weight) @ self.ring.T


COUNTING = {
    "written": lambda: Counter(False),
    "assigned": lambda: Counter(True),
    "ring": lambda: Queue(False),
    "ring, at a number of Python": lambda: Queue(True),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
}


@every("make", COUNTING)
def test_integer_and_boolean_buffers_are_carried_as_in_the_ordinary_way(make, generator):
    def loss(model, batch):
        return model(batch[0]).square().mean()

    ours, theirs = trained(make(), OPTIMIZERS["sgd"], mlp(generator).batches, loss)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_count_makes_the_losses_of_a_loop():
    pure, params, buffers = functional.from_module(Counter(False), lambda model, batch: model(batch))
    values = []
    for _ in range(3):
        value, buffers = pure(params, buffers, torch.tensor(2.0))
        values.append(value.item())
    assert values == [2.0 + 1, 8.0, 18.0 + 1]


@every("make", {k: v for k, v in COUNTING.items() if "Python" not in k})
def test_vmap_carries_integer_buffers_as_a_loop_does(make, generator):
    pure, params, buffers = functional.from_module(
        make(), lambda model, batch: model(batch[0]).square().mean()
    )
    training, batches = Training(pure, SGD()), mlp(generator).batches[:3]
    meta = training.init_meta(params, lr=0.1)

    def final(scale):
        carry = training.init({k: scale * p for k, p in params.items()}, buffers)
        for batch in batches:
            carry, _ = training.step(meta, carry, batch)
        return carry

    scales = torch.tensor([0.5, 1.0])
    looped = tree.stack([final(s) for s in scales])
    torch.testing.assert_close(vmap(final)(scales), looped, rtol=1e-12, atol=1e-12)


def test_a_module_takes_back_all_that_was_trained(generator):
    problem = convnet(generator)
    training = Training(problem.loss, SGD())
    carry = training.init(problem.params, problem.buffers)
    carry, _ = training.step(training.init_meta(problem.params, lr=0.1), carry, problem.batches[0])
    problem.model.load_state_dict({**carry.params, **carry.buffers})
    assert problem.model.get_buffer("1.num_batches_tracked") == 1


def test_threads_that_evaluate_one_loss_at_once_get_the_numbers_of_one_thread(generator):
    problem = convnet(generator)
    training, batch = problem.training(SGD()), problem.batches[0]
    starts = [moved(problem.params, generator) for _ in range(4)]

    meta = training.init_meta(problem.params, lr=0.1)

    def evaluated(params):
        return [training.evaluate(meta, training.init(params, problem.buffers), batch) for _ in range(60)]

    alone = [evaluated(params) for params in starts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(evaluated, starts))
    assert_same_bits(together, alone)


def test_what_a_forward_counts_in_an_attribute_is_there_in_the_next_call():
    class Impure(nn.Linear):
        calls = 0

        def forward(self, input):
            self.calls += 1
            return super().forward(input) * self.calls

    loss, params, buffers = functional.from_module(Impure(2, 1), lambda model, batch: model(batch).sum())
    first, second = (loss(params, buffers, torch.ones(1, 2))[0] for _ in range(2))
    assert second == 2 * first  # what is impure can be seen


@every("setting", SETTINGS)
def test_tied_weights_are_one_parameter(setting, generator):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    ours, theirs = trained(filled(model, generator), setting, mlp(generator).batches)
    assert set(ours[0]) == {"0.weight", "0.bias", "2.bias"}
    assert_near(ours, theirs, rtol=1e-12)


@every("setting", SETTINGS)
def test_frozen_parameters_stay_with_the_module(setting, generator):
    problem = mlp(generator)
    problem.model.get_submodule("0").requires_grad_(False)
    ours, theirs = trained(problem.model, setting, problem.batches)
    assert set(ours[0]) == {"2.weight", "2.bias"}
    assert_near(ours, theirs, rtol=1e-12)


def test_a_batch_may_be_nothing_or_hold_what_is_no_tensor(generator):
    inputs, labels = mlp(generator).batches[0]
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def loss(model, batch):
        return (batch or 3) * batch_loss(model, (inputs, labels))

    for batch in (None, 2):
        pure, params, buffers = functional.from_module(model, loss)
        assert_same_bits(pure(params, buffers, batch)[0], loss(copy.deepcopy(model), batch).detach())


NOISY = {
    "dropout": lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)),
    "inside": lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.5))),
    "rrelu": lambda: nn.Sequential(nn.RReLU()),
    "pooling": lambda: nn.Sequential(nn.FractionalMaxPool2d(2, output_size=2)),
    "recurrent": lambda: nn.LSTM(2, 2, num_layers=2, dropout=0.1),
    "attention": lambda: nn.MultiheadAttention(2, 1, dropout=0.1),
    "transformer": lambda: nn.TransformerEncoderLayer(2, 1, 4, dropout=0.1),
}


@every("make", NOISY)
def test_a_module_that_draws_random_numbers_is_refused_in_training_mode_only(make):
    model = make()
    with pytest.raises(
        ValueError, match=r"draws random numbers.*\. Pass seeded=True, put it in eval mode, or"
    ):
        functional.from_module(model.train(), batch_loss)
    functional.from_module(model.train(), batch_loss, seeded=True)
    functional.from_module(model.eval(), batch_loss)


def test_dropout_of_nothing_is_no_noise():
    functional.from_module(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), batch_loss)


def old_norm(norm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, that there is a new one
        return nn.Sequential(norm(nn.Linear(2, 2)))


IMPURE = {
    "max_norm": (lambda: nn.Embedding(3, 2, max_norm=1.0), r"Embedding.* in place.* max_norm=None"),
    "max_norm, of a bag": (lambda: nn.EmbeddingBag(3, 2, max_norm=1.0), r"Bag.* in place.* max_norm=None"),
    "by frequency": (lambda: nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
    "weight_norm": (lambda: old_norm(nn.utils.weight_norm), r"parametrizations\.weight_norm\.$"),
    "spectral_norm": (lambda: old_norm(nn.utils.spectral_norm), r"parametrizations\.spectral_norm\.$"),
    "lazy": (lambda: nn.LazyLinear(2), r"no shape yet\. Call the model once"),
}


@every("make, words", IMPURE)
def test_a_module_that_cannot_be_pure_is_refused_with_a_remedy(make, words):
    with pytest.raises(ValueError, match=words):
        functional.from_module(make(), batch_loss)


def test_the_new_norms_of_weights_are_taken(generator):
    for norm in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        ours, theirs = trained(norm(nn.Linear(3, 2)), OPTIMIZERS["sgd"], mlp(generator).batches)
        assert_near(ours, theirs, rtol=1e-12)


def test_a_model_with_a_buffer_named_seed_cannot_be_seeded():
    model = nn.Linear(2, 2)
    model.register_buffer("seed", torch.ones(1))
    functional.from_module(model, batch_loss)
    with pytest.raises(ValueError, match=r"named 'seed', got a model with one\. Rename it"):
        functional.from_module(model, batch_loss, seeded=True)


def shared_data():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight.data = first.weight.data
    return nn.Sequential(first, second)


def buffer_of_a_parameter():
    model = nn.Linear(3, 3)
    model.register_buffer("target", model.weight.data)
    return model


def buffer_that_is_a_view():
    model = nn.Linear(3, 3)
    model.register_buffer("bank", torch.zeros(4, 3))
    model.register_buffer("row", model.bank[1])  # pyright: ignore[reportIndexIssue]
    return model


def hooked():
    model = nn.Linear(3, 3)
    model.weight.register_hook(lambda g: 2 * g)
    return model


def keeping_activations():
    class Keeping(nn.Linear):
        def forward(self, input):
            self.last = super().forward(input)
            return self.last

    model = Keeping(3, 3)
    model(torch.ones(2, 3))
    return model


NOT_PURE = {
    "shared data": (shared_data, "share memory"),
    "a buffer of a parameter": (buffer_of_a_parameter, "share memory"),
    "a view": (buffer_that_is_a_view, "share memory"),
    "a hook": (hooked, "has a hook"),
    "activations": (keeping_activations, "keeps a tensor that was computed"),
    "sparse gradients": (lambda: nn.Embedding(4, 3, sparse=True), "sparse gradients"),
    "data parallel": (lambda: nn.DataParallel(nn.Linear(3, 3)), "Pass the module that it was made of"),
}


@every("make, says", NOT_PURE)
def test_what_a_pure_loss_could_not_keep_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        functional.from_module(make(), lambda model, x: model(x).sum())


def test_tied_weights_are_one_parameter_and_not_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    _, params, _ = functional.from_module(model, lambda model, x: model(x).sum())
    assert sorted(params) == ["0.bias", "0.weight", "1.bias"]
