"""Randomness as data: the same numbers whenever a step is taken, and good ones."""

import math
from functools import partial

import numpy
import pytest
import torch
from problems import assert_near, assert_same_bits, batch_loss, every, filled
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from metafop import SGD, Adam, Carry, Momentum, Online, Training, functional, hypergradients, randomness, tree
from metafop.randomness import numbers
from metafop.randomness.numbers import Numbers

LOW = numpy.uint64(2**32 - 1)
STEP = 2**32


def mix(x):
    for k, c in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = (x + (x >> numpy.uint64(k))) * numpy.uint64(c) & LOW
    return (x >> numpy.uint64(15)) ^ x


def documented(seed, call, count):
    """The formula of metafop/randomness/numbers.py, in numpy's unsigned integers."""
    run, step, call = numpy.uint64(seed) & LOW, numpy.uint64(seed) >> numpy.uint64(32), numpy.uint64(call)
    a, b = (mix(mix(mix(run ^ numpy.uint64(c)) ^ step) ^ call) for c in (0x243F6A88, 0x85A308D3))
    return mix(mix(numpy.arange(count, dtype=numpy.uint64) ^ a) ^ b)


def drawn(seed, function):
    with randomness.seeded(torch.as_tensor(seed)):
        return function()


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 5 * STEP + 3])
def test_the_masks_of_dropout_are_those_of_the_documented_formula(seed):
    x = torch.ones(6, 50)
    ours = drawn(seed, lambda: [F.dropout(x, 0.3), F.dropout(x, 0.7)])
    for call, (mask, p) in enumerate(zip(ours, (0.3, 0.7), strict=True)):
        kept = documented(seed, call, 300).reshape(6, 50) >= int(p * 2**32)
        assert_same_bits(mask, torch.from_numpy(kept).double() / (1 - p))


def test_uniform_numbers_are_the_leading_digits_of_the_bits():
    bits = documented(9, 0, 1000)
    assert_same_bits(drawn(9, lambda: torch.rand(1000)), torch.from_numpy(bits / 2**32))
    single = drawn(9, lambda: torch.rand(1000, dtype=torch.float32))
    assert_same_bits(single, torch.from_numpy((bits >> numpy.uint64(8)) / 2**24).float())


STREAMS = {
    "elements": lambda n: Numbers(torch.tensor(0)).bits((n,)),
    "seeds": lambda n: vmap(lambda seed: Numbers(seed).bits(()))(torch.arange(n)),
    "steps": lambda n: vmap(lambda seed: Numbers(seed).bits(()))(STEP * torch.arange(n)),
    "calls": lambda n: torch.cat([draw((n // 500,)) for draw in 500 * [Numbers(torch.tensor(0)).bits]]),
}


@every("stream", STREAMS)
def test_neighbours_are_uniform_and_independent(stream):
    count = 500_000
    bits = stream(count)
    x = (bits.double() + 0.5) / 2**32
    error = 5 / math.sqrt(count)  # five standard errors
    assert abs(x.mean() - 0.5) < error * math.sqrt(1 / 12)
    assert abs(x.var() - 1 / 12) < error * math.sqrt(1 / 180)
    scaled = (x - 0.5) * math.sqrt(12)
    for lag in (1, 2, 3, 7, 64, 1000):
        assert abs((scaled[lag:] * scaled[:-lag]).mean()) < 1.1 * error
    for bit in range(32):
        ones = (bits >> bit) & 1
        assert abs(ones.double().mean() - 0.5) < error / 2
        assert abs((ones[1:] ^ ones[:-1]).double().mean() - 0.5) < error / 2
    cells = torch.bincount((x[0::2] * 32).long() * 32 + (x[1::2] * 32).long(), minlength=1024)
    chi = (cells - count / 2048).square().sum() / (count / 2048)
    assert abs(chi - 1023) < 5 * math.sqrt(2 * 1023)
    assert len(bits.unique()) > count * 0.9995  # as many as numbers drawn at random


def test_masks_of_neighbouring_seeds_steps_and_calls_are_independent():
    def mask(seed, call):
        draws = Numbers(torch.tensor(seed))
        return [draws.kept((100_000,), 0.5) for _ in range(call + 1)][-1].double() - 0.5

    masks = torch.stack([mask(s, c) for s in (0, 1, 2, 3, STEP, STEP + 1, 2 * STEP) for c in (0, 1, 2)])
    correlations = 4 * masks @ masks.T / 100_000 - torch.eye(len(masks))
    assert correlations.abs().max() < 5 / math.sqrt(100_000)


def test_every_bit_of_an_index_changes_half_of_the_bits():
    index = torch.arange(20_000) * 7919
    for bit in range(32):
        changed = numbers.mix(numbers.mix(index)) ^ numbers.mix(numbers.mix(index ^ (1 << bit)))
        rates = torch.stack([((changed >> k) & 1).double().mean() for k in range(32)])
        assert (rates - 0.5).abs().max() < 0.02


made = partial(torch.rand, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
x, sequence, image, volume = made(4, 6) + 0.1, made(2, 4, 6), made(2, 3, 9, 9), made(2, 3, 7, 7, 7)
DRAWING = {
    "dropout": lambda: F.dropout(x),
    "dropout, written": lambda: F.dropout(1 * x, inplace=True),
    "dropout of torch": lambda: torch.dropout(x, 0.5, True),
    "dropout of aten": lambda: torch.ops.aten.dropout(x, 0.5, True),
    "dropout of an overload": lambda: torch.ops.aten.dropout.default(x, 0.5, True),
    "dropout1d": lambda: F.dropout1d(sequence),
    "dropout2d": lambda: F.dropout2d(image),
    "dropout3d": lambda: F.dropout3d(volume),
    "alpha_dropout": lambda: F.alpha_dropout(x, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(image, training=True),
    "rrelu": lambda: F.rrelu(-x, training=True),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(image, 2, output_size=4),
    "fractional_max_pool3d": lambda: F.fractional_max_pool3d(volume, 2, output_size=3, return_indices=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(x),
    "attention": lambda: F.scaled_dot_product_attention(sequence, sequence, sequence, dropout_p=0.5),
    "rand": lambda: [torch.rand(3, 2), torch.rand((3, 2)), torch.rand(size=(3, 2), dtype=torch.float32)],
    "randn": lambda: [torch.randn(3, 2), torch.randn((), dtype=torch.bfloat16), torch.randn_like(x)],
    "rand_like": lambda: torch.rand_like(x),
    "randint": lambda: [torch.randint(9, (3,)), torch.randint(2, 9, (3,)), torch.randint(high=9, size=(3,))],
    "randint_like": lambda: [torch.randint_like(x, 9), torch.randint_like(x, 3, 9)],
    "randperm": lambda: torch.randperm(20),
    "normal": lambda: [
        torch.normal(x, x),
        torch.normal(x),
        torch.normal(1.0, x),
        torch.normal(0.0, 1.0, (3,)),
    ],
    "bernoulli": lambda: [torch.bernoulli(x.clamp(max=1)), x.bernoulli(0.3), torch.bernoulli(x, 0.5)],
    "uniform_": lambda: [torch.empty(3).uniform_(), torch.empty_like(x).uniform_(2, to=3)],
    "normal_": lambda: [torch.empty(3).normal_(), x.new_empty(3).normal_(mean=2, std=0.1)],
    "bernoulli_": lambda: [torch.empty(9).bernoulli_(), torch.empty_like(x).bernoulli_(0 * x + 0.5)],
    "random_": lambda: [torch.empty(3).random_(), torch.empty(3, dtype=torch.int64).random_(3, 99)],
    "exponential_": lambda: torch.empty(3).exponential_(2.0),
    "geometric_": lambda: torch.empty(30).geometric_(0.2),
    "cauchy_": lambda: torch.empty(3).cauchy_(),
    "log_normal_": lambda: torch.empty(3).log_normal_(),
    "initialising": lambda: [nn.init.normal_(torch.empty(3)), nn.init.xavier_uniform_(torch.empty(3, 3))],
    "distributions": lambda: [
        torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
        torch.distributions.Laplace(x, 1.0, validate_args=False).rsample(),
    ],
}


class Watched(TorchDispatchMode):
    """Fails if torch itself draws."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert torch.Tag.nondeterministic_seeded not in func.tags, func
        return func(*args, **(kwargs or {}))


@every("draw", DRAWING)
def test_a_drawing_function_of_torch_is_a_function_of_the_seed(draw):
    state = torch.get_rng_state()
    with Watched():
        first, again = drawn(3, draw), drawn(3, draw)
        others = drawn(4, draw), drawn(3 + STEP, draw), drawn(3, lambda: [torch.rand(()), draw()][1])
    assert_same_bits(again, first)
    for other in others:
        assert any(not torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(other), strict=True))
    for ours, torchs in zip(tree.leaves(first), tree.leaves(draw()), strict=True):
        assert (ours.shape, ours.dtype) == (torchs.shape, torchs.dtype)
    torch.set_rng_state(state)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, for fractional pooling
@every("draw", {name: draw for name, draw in DRAWING.items() if name != "dropout, written"})
def test_vmap_over_seeds_draws_what_a_loop_draws(draw):
    seeds = torch.tensor([0, 7, 5 * STEP])
    assert_near(
        vmap(partial(drawn, function=draw))(seeds), tree.stack([drawn(s, draw) for s in seeds]), 1e-14
    )


def test_torchs_generator_is_neither_read_nor_moved():
    state = torch.get_rng_state()
    drawn(0, lambda: [draw() for draw in DRAWING.values()])
    assert torch.equal(torch.get_rng_state(), state)


MOMENTS = {  # mean and variance
    "rand": (lambda n: torch.rand(n), 0.5, 1 / 12),
    "randn": (lambda n: torch.randn(n), 0.0, 1.0),
    "randint": (lambda n: torch.randint(-2, 3, (n,)).double(), 0.0, 2.0),
    "exponential_": (lambda n: torch.empty(n).exponential_(2.0), 0.5, 0.25),
    "geometric_": (lambda n: torch.empty(n).geometric_(0.25), 4.0, 12.0),
    "bernoulli": (lambda n: torch.bernoulli(torch.full((n,), 0.3)), 0.3, 0.21),
    "rrelu": (lambda n: F.rrelu(-torch.ones(n), 0.2, 0.8, training=True), -0.5, 0.03),
    "dropout": (lambda n: F.dropout(torch.ones(n), 0.2), 1.0, 0.25),
    "alpha_dropout": (lambda n: F.alpha_dropout(torch.randn(n), 0.2, training=True), 0.0, 1.0),
    "gumbel": (
        lambda n: F.gumbel_softmax(torch.tensor([[1.0, 3.0]]).log().expand(n, 2), hard=True)[:, 1],
        0.75,
        0.1875,
    ),
}


@every("draw, mean, variance", MOMENTS)
def test_what_is_drawn_has_the_moments_of_its_distribution(draw, mean, variance):
    values = drawn(1, lambda: draw(200_000))
    assert abs(values.mean() - mean) < 5 * math.sqrt(variance / 200_000)
    assert abs(values.var() / variance - 1) < 0.03


def test_a_permutation_is_one_and_each_number_comes_first_as_often():
    first = torch.stack([drawn(seed, lambda: torch.randperm(5)) for seed in range(2000)])
    assert_same_bits(first.sort(dim=1).values, torch.arange(5).expand(2000, 5))
    assert (torch.bincount(first[:, 0]) - 400).abs().max() < 5 * math.sqrt(400)


def test_a_channel_is_dropped_as_a_whole():
    masks = drawn(0, lambda: F.dropout2d(torch.ones(20, 30, 4, 4), 0.4))
    assert_same_bits(masks, masks[:, :, :1, :1].expand(20, 30, 4, 4))
    assert 0.3 < (masks == 0).double().mean() < 0.5


NEARLY_NOTHING = 1e-12  # so small a chance that nothing is dropped

ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "added": {"attn_mask": torch.randn(5, 5, generator=torch.Generator().manual_seed(0))},
    "allowed": {"attn_mask": torch.eye(5, dtype=torch.bool).roll(1, 0).tril()},  # the first attends to none
}


@every("options", ATTENTION)
def test_attention_that_drops_nothing_is_torchs(options, generator):
    q, k, v = torch.randn(3, 2, 4, 5, 6, generator=generator)
    ours = drawn(0, lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=NEARLY_NOTHING, **options))
    assert_near(ours, F.scaled_dot_product_attention(q, k, v, **options), 1e-11)
    fewer = (q, k[:, :2], v[:, :2])
    ours = drawn(0, lambda: F.scaled_dot_product_attention(*fewer, dropout_p=NEARLY_NOTHING, enable_gqa=True))
    assert_near(ours, F.scaled_dot_product_attention(*fewer, enable_gqa=True), 1e-11)


def test_attention_drops_weights_by_the_mask_of_dropout(generator):
    q, k, v = torch.randn(3, 2, 5, 6, generator=generator)
    ours = drawn(5, lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.4))
    weights = (q @ k.mT / math.sqrt(6)).softmax(-1)
    assert_near(ours, drawn(5, lambda: F.dropout(weights, 0.4)) @ v, 1e-13)


RECURRENT = {
    "lstm": partial(nn.LSTM, 3, 4),
    "lstm, projected both ways": partial(nn.LSTM, 3, 4, proj_size=2, bidirectional=True),
    "gru, no bias": partial(nn.GRU, 3, 4, bias=False),
    "rnn, batch first": partial(nn.RNN, 3, 4, batch_first=True),
    "rnn of relu, both ways": partial(nn.RNN, 3, 4, nonlinearity="relu", bidirectional=True),
}


def tensors(result):
    return [leaf for leaf in tree.leaves(result) if leaf is not None]


@every("make", RECURRENT)
def test_recurrent_layers_that_drop_nothing_are_torchs(make, generator):
    ours = filled(make(num_layers=3, dropout=NEARLY_NOTHING), generator)
    theirs = make(num_layers=3)
    theirs.load_state_dict(ours.state_dict())
    inputs = torch.randn(5, 2, 3, generator=generator)
    packed = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([4, 2]))
    for x in (inputs, inputs[:, 0], packed):
        assert_near(tensors(drawn(0, lambda x=x: ours(x))), tensors(theirs(x)), 1e-10)


def test_recurrent_layers_drop_between_them(generator):
    model = filled(nn.GRU(3, 4, num_layers=2, dropout=0.4), generator)
    first, second = nn.GRU(3, 4), nn.GRU(4, 4)
    for layer, single in enumerate((first, second)):
        own = {k: v for k, v in model.state_dict().items() if k.endswith(f"l{layer}")}
        single.load_state_dict({k.replace(f"l{layer}", "l0"): v for k, v in own.items()})
    inputs = torch.randn(5, 2, 3, generator=generator)
    by_hand = drawn(3, lambda: second(F.dropout(first(inputs)[0], 0.4))[0])
    assert_near(drawn(3, lambda: model(inputs))[0], by_hand, 1e-13)


def test_what_draws_nothing_is_torchs_own(generator):
    q, k, v = torch.randn(3, 2, 4, 5, 6, generator=generator)
    lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.5).eval()
    still = {
        "eval": lambda: F.dropout(q, 0.5, training=False),
        "nothing": lambda: F.dropout(q, 0.0),
        "rrelu": lambda: F.rrelu(q),
        "attention": lambda: F.scaled_dot_product_attention(q, k, v),
        "lstm": lambda: lstm(q[0])[0],
    }
    for function in still.values():
        assert_same_bits(drawn(0, function), function())


REFUSED = {
    "poisson": lambda: torch.poisson(x),
    "multinomial": lambda: torch.multinomial(x, 1),
    "_standard_gamma": lambda: torch.distributions.Gamma(x, 1.0).rsample(),
    "native_dropout": lambda: torch.native_dropout(x, 0.5, True),
    "kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(3, 3)),
    "rand with a generator": lambda: torch.rand(3, generator=torch.Generator()),
    "normal_ with a generator": lambda: torch.empty(3).normal_(generator=torch.Generator()),
    "randn with out": lambda: torch.randn(3, out=torch.empty(3)),
    "integers from a range of 1 to 2": lambda: torch.randint(2**40, (3,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_function_of_the_seed_is_refused(name):
    with pytest.raises(ValueError, match=rf"A seeded loss .*{name}.*\. [A-Z]"):
        drawn(0, REFUSED[name])


@pytest.mark.parametrize("seed", [3, torch.tensor(3.0), torch.zeros(2, dtype=torch.int64)])
def test_a_seed_is_an_int64_scalar(seed):
    with pytest.raises(TypeError, match=r"int64 scalar, got .*torch\.tensor\(0\)"):
        randomness.seeded(seed)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.head(self.encoder(inputs).mean(1))


def encoder(generator):
    """A training of a transformer with dropout, from seed 7, and what an estimator takes besides."""
    model = filled(Encoder(), generator)
    loss, params, buffers = functional.from_module(model, batch_loss, seeded=True)
    buffers["seed"] = torch.tensor(7)
    training = Training(loss, Momentum())
    meta = training.init_meta(params, lr=0.05, momentum=0.9)
    shape = (5, 3, 4)
    batches = [
        (torch.randn(shape, generator=generator), torch.randint(2, (5,), generator=generator))
        for _ in range(4)
    ]

    def outer_loss(carry):
        return loss(carry.params, carry.buffers, batches[0])[0]

    return model, (training, outer_loss, meta, training.init(params, buffers), batches)


def by_hand(model, meta, params, batches):
    """The outer loss and its derivative in lr and momentum, by an ordinary loop of torch.autograd."""
    hyper = [x.clone().requires_grad_() for x in (meta.hyper.lr, meta.hyper.momentum)]
    params = {k: p.clone().requires_grad_() for k, p in params.items()}
    velocity, seed = tree.zeros_like(params), torch.tensor(7)

    def value(batch):
        with randomness.seeded(seed):
            return batch_loss(lambda inputs: functional_call(model, params, (inputs,)), batch)

    for batch in batches:
        grads = torch.autograd.grad(value(batch), list(params.values()), create_graph=True)
        velocity = {k: hyper[1] * v + g for (k, v), g in zip(velocity.items(), grads, strict=True)}
        params = {k: p - hyper[0] * velocity[k] for k, p in params.items()}
        seed = randomness.next_seed(seed)
    final = value(batches[0])
    return final.detach(), torch.autograd.grad(final, hyper)


ESTIMATORS = {
    "adjoint": hypergradients.adjoint,
    "autograd": hypergradients.autograd,
    "few carries": hypergradients.Adjoint(keep="sqrt"),
    "compiled": hypergradients.Adjoint(compile=True),
    "forward over reverse": hypergradients.Adjoint(over="forward"),
    "forward": hypergradients.Forward(learn=("lr",)),
}


@every("estimator", ESTIMATORS)
def test_the_hypergradient_of_a_transformer_with_dropout_is_that_of_a_loop_by_hand(estimator, generator):
    model, problem = encoder(generator)
    estimate = estimator(*problem)
    value, (d_lr, d_momentum) = by_hand(model, problem[2], problem[3].params, problem[4])
    assert_near(estimate.value, value, 1e-10)
    assert_near(estimate.grads.hyper.lr, d_lr, 1e-10)
    if estimator is not ESTIMATORS["forward"]:
        assert_near(estimate.grads.hyper.momentum, d_momentum, 1e-10)


def trained(training, meta, carry, batches):
    for batch in batches:
        carry, _ = training.step(meta, carry, batch)
    return carry


def test_a_training_that_is_resumed_draws_the_same_numbers(generator, tmp_path):
    _, (training, _, meta, carry, batches) = encoder(generator)
    torch.save(trained(training, meta, carry, batches[:2]), tmp_path / "carry.pt")
    resumed = torch.load(tmp_path / "carry.pt")
    whole = trained(training, meta, carry, batches)
    assert_same_bits(trained(training, meta, resumed, batches[2:]), whole)
    assert whole.buffers["seed"] == 7 + 4 * STEP


def test_vmap_over_seeds_trains_as_a_loop_over_seeds(generator):
    _, (training, _, meta, carry, batches) = encoder(generator)

    def final(seed):
        return trained(training, meta, Carry(carry.params, carry.opt, {"seed": seed}), batches)

    seeds = torch.arange(3)
    assert_near(vmap(final)(seeds), tree.stack([final(seed) for seed in seeds]), 1e-12, size=1.0)


def test_vmap_over_learning_rates_shares_the_numbers_of_the_seed(generator):
    _, (training, _, meta, carry, batches) = encoder(generator)

    def final(lr):
        return trained(training, meta._replace(hyper=meta.hyper._replace(lr=lr)), carry, batches)

    rates = torch.tensor([0.01, 0.1])
    assert_near(vmap(final)(rates), tree.stack([final(lr) for lr in rates]), 1e-12, size=1.0)


def noisy(params, batch):
    hidden = F.dropout(torch.tanh(batch @ params["w"]), 0.3)
    return (hidden + 0.1 * torch.randn_like(hidden)).square().mean() + F.gumbel_softmax(params["w"])[0, 0]


def test_noise_in_a_plain_loss_is_that_of_its_step(generator):
    loss = functional.plain(noisy, seeded=True)
    params, batch = {"w": torch.randn(3, 4, generator=generator)}, torch.randn(6, 3, generator=generator)
    value, buffers = loss(params, {"seed": torch.tensor(2), "other": torch.ones(1)}, batch)
    with randomness.seeded(torch.tensor(2)):
        assert_same_bits(value, noisy(params, batch))
    assert buffers == {"seed": torch.tensor(2 + STEP), "other": torch.ones(1)}
    along = {"w": torch.randn(3, 4, generator=generator)}

    def alone(params):
        return loss(params, {"seed": torch.tensor(2)}, batch)[0]

    h, slope = 1e-6, jvp(alone, (params,), (along,))[1]
    ends = [alone({"w": params["w"] + sign * h * along["w"]}) for sign in (1, -1)]
    assert_near((ends[0] - ends[1]) / (2 * h), slope, 1e-7)
    assert_near(tree.dot(grad(alone)(params)["w"], along["w"]), slope, 1e-12)


def test_a_seeded_loss_without_a_seed_says_how_to_give_one():
    training = Training(functional.plain(noisy, seeded=True), SGD())
    params = {"w": torch.ones(3, 4)}
    meta, carry = training.init_meta(params, lr=0.1), training.init(params)
    with pytest.raises(ValueError, match=r'from the buffers, got \[\]\. .*\{"seed": torch\.tensor\(0\)\}'):
        training.evaluate(meta, carry, torch.ones(2, 3))


def test_torch_compile_follows_a_seeded_online_step(generator):
    _, (training, _, meta, carry, batches) = encoder(generator)
    online = Online(training, Adam(), ("lr",))
    outer_meta, state = online.init_meta(meta, lr=0.01), online.init(meta, carry)
    torch.compiler.reset()  # it gives up on code that other tests had it build often
    step = torch.compile(online.step, fullgraph=True, backend="eager")
    ours = theirs = state
    for batch in batches[:2]:
        ours, theirs = step(outer_meta, ours, batch)[0], online.step(outer_meta, theirs, batch)[0]
    assert_near(ours, theirs, 1e-12, size=1.0)


def test_complex_numbers_are_refused():
    with (
        randomness.seeded(torch.tensor(0)),
        pytest.raises(ValueError, match=r"draws real numbers, got torch.complex"),
    ):
        torch.randn(3, dtype=torch.complex128)


@pytest.mark.parametrize("mode", ["error", "different", "same"])
def test_drawing_inside_a_vmap_of_the_loss_is_refused(mode):
    with randomness.seeded(torch.tensor(0)), pytest.raises(ValueError, match="inside a vmap of its own"):
        vmap(lambda x: x + torch.randn(3), randomness=mode)(torch.zeros(4, 3))
