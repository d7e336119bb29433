"""Operations without a second derivative are written out, or named where they cannot be."""

import threading

import pytest
import torch
from problems import assert_near, assert_same_bits, every, filled, slope
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from metafop import Momentum, Training, functional
from metafop.hypergradients import Adjoint, Evolution, Forward, adjoint, autograd
from metafop.twice_differentiable import TwiceDifferentiable, attention, weight_norm


def window(loss, shape, batch, steps=3):
    rng = torch.Generator().manual_seed(0)
    training = Training(functional.plain(loss), Momentum())
    params = {"w": 0.5 * torch.randn(shape, generator=rng)}
    meta = training.init_meta(params, lr=0.1, momentum=0.5)
    return (
        training,
        lambda carry: carry.params["w"].square().sum(),
        meta,
        training.init(params),
        steps * [batch],
    )


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "mask": {"attn_mask": torch.tensor([[True, False, True], [True, True, True], [False, True, True]])},
    "bias": {
        "attn_mask": torch.tensor([[0.1, -1.0, 0.3], [0.0, 2.0, 0.0], [1.0, 0.5, -0.5]], dtype=torch.float64)
    },
}


@every("settings", ATTENTION)
def test_attention_written_out_is_attention(settings, generator):
    q, k, v = torch.randn(3, 2, 4, 3, 5, generator=generator)
    torch.testing.assert_close(
        attention(q, k, v, **settings), F.scaled_dot_product_attention(q, k, v, **settings)
    )


def test_attention_in_groups_is_attention(generator):
    q, (k, v) = torch.randn(2, 4, 3, 5, generator=generator), torch.randn(2, 2, 2, 3, 5, generator=generator)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, enable_gqa=True), expected)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_weight_norm_written_out_is_weight_norm(dim, generator):
    v = torch.randn(3, 4, 5, generator=generator)
    g = torch.norm_except_dim(v, 2, dim) + 1
    torch.testing.assert_close(weight_norm(v, g, dim), torch._weight_norm(v, g, dim))


def attending(params, x):
    return F.scaled_dot_product_attention(x @ params["w"], x, x.tanh()).square().mean()


def test_attention_is_differentiated_twice_by_every_estimator(generator):
    given = window(attending, (4, 4), torch.randn(2, 2, 3, 4, generator=generator))
    expected = autograd(*given).grads
    for estimator in (adjoint, Adjoint("log"), Adjoint(over="forward")):
        assert_near(estimator(*given).grads, expected, 1e-12)
    assert_near(Forward(("lr",))(*given).grads.hyper.lr, expected.hyper.lr, 1e-12)


ENCODERS = {
    "an encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
    "an encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ),
    "a decoder layer": lambda: TargetToItself(
        nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    ),
    "attention": lambda: Weightless(nn.MultiheadAttention(4, 2, batch_first=True)),
}


class TargetToItself(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x)


class Weightless(TargetToItself):
    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


@every("make", ENCODERS)
def test_torch_s_own_attention_layers_are_differentiated_twice(make, generator):
    model, x = filled(make(), generator), torch.randn(3, 5, 4, generator=generator)
    loss, params, buffers = functional.from_module(model, lambda model, x: model(x).square().mean())
    training = Training(loss, Momentum())
    meta, carry = training.init_meta(params, lr=0.05), training.init(params, buffers)
    given = training, lambda carry: loss(carry.params, carry.buffers, x)[0], meta, carry, 3 * [x]
    expected = slope(given)
    for estimator in (adjoint, autograd, Adjoint("log"), Forward(("lr",))):
        torch.testing.assert_close(estimator(*given).grads.hyper.lr, expected, rtol=1e-6, atol=0)


def test_what_others_compute_meanwhile_is_not_written_out(generator):
    """torch's own switch of attention kernels is one for the whole process."""
    flags = torch.backends.cuda
    before = flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()
    seen = []

    def loss(params, x):
        seen.append((flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()))
        return attending(params, x)

    adjoint(*window(loss, (4, 4), torch.randn(2, 2, 3, 4, generator=generator)))
    assert set(seen) == {before}
    used, x = [], torch.ones(1, 1, 2, 2)
    with TwiceDifferentiable() as mode:
        thread = threading.Thread(target=lambda: used.append(F.scaled_dot_product_attention(x, x, x)))
        thread.start()
        thread.join()
    assert used
    assert not mode.used


def test_estimates_in_four_threads_are_those_of_one(generator):
    x = torch.randn(2, 2, 3, 4, generator=generator)
    given = window(attending, (4, 4), x, steps=5)
    training, outer_loss, meta, carry, batches = given
    metas = [meta._replace(hyper=meta.hyper._replace(lr=torch.tensor(lr))) for lr in (0.05, 0.1, 0.2, 0.4)]
    expected = [adjoint(training, outer_loss, each, carry, batches) for each in metas]
    found = [[] for _ in metas]

    def run(i):
        for _ in range(5):
            found[i].append(adjoint(training, outer_loss, metas[i], carry, batches))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(metas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each, several in zip(expected, found, strict=True):
        assert len(several) == 5
        for other in several:
            assert_same_bits(other.grads, each.grads)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * ctx.saved_tensors[0].cos()


def packed(params, x):
    sequences = nn.utils.rnn.pack_padded_sequence(x @ params["w"], torch.tensor([3, 2]))
    return nn.GRU(4, 4)(sequences)[0].data.square().mean()


CDIST_FAILS = torch.__version__ < "2.15"  # from then on it has a second derivative
LENGTHS = torch.tensor([3, 3])
KEPT = {}


def keeping(params, x):
    """A state that is no buffer."""
    z = x @ params["w"]
    value = (z - KEPT.get("last", 0.0)).square().mean()
    KEPT["last"] = 0.5 * z
    return value


def into_what_is_captured(params, x):
    COUNT.add_((x @ params["w"]).mean())
    return (x @ params["w"]).square().mean() * COUNT


COUNT = torch.ones((), dtype=torch.float64)
UNSUPPORTED = {
    "a state that is no buffer": (keeping, "Make "),  # it a buffer, or the loss a function of its arguments
    "what is captured": (into_what_is_captured, "writes in place"),
    "embedding bag": (
        lambda params, x: F.embedding_bag(torch.tensor([[0, 1], [2, 3]]), params["w"]).square().mean(),
        "second one, of embedding_bag",
    ),
    "ctc": (
        lambda params, x: F.ctc_loss(
            (x @ params["w"]).log_softmax(-1), torch.ones(2, 1).long(), LENGTHS, LENGTHS // 3
        ),
        "second one, of ctc_loss",
    ),
    "cdist": (lambda params, x: torch.cdist(x @ params["w"], x).mean(), "second one, of cdist"),
    "checkpoint": (
        lambda params, x: checkpoint(torch.tanh, x @ params["w"], use_reentrant=False).square().mean(),
        "uses torch.utils.checkpoint",
    ),
    "checkpoint, reentrant": (
        lambda params, x: checkpoint(torch.tanh, x @ params["w"], use_reentrant=True).square().mean(),
        "without setup_context",
    ),
    "an old function": (
        lambda params, x: Sine.apply(x @ params["w"]).square().mean(),
        "without setup_context",
    ),
    "packed": (packed, "PackedSequence"),
    "dropout": (lambda params, x: F.dropout(x @ params["w"]).square().mean(), "seeded=True"),
}


@every("estimator", {"adjoint": adjoint, "autograd": autograd, "forward": Forward(("lr",))})
@every("loss, says", UNSUPPORTED)
def test_what_torch_cannot_do_is_said_in_sentences_with_a_remedy(loss, says, estimator, generator):
    given = window(loss, (4, 4), torch.randn(3, 2, 4, generator=generator))
    if "cdist" in says and not CDIST_FAILS:
        torch.testing.assert_close(estimator(*given).grads.hyper.lr, slope(given), rtol=1e-6, atol=0)
        return
    with pytest.raises((NotImplementedError, ArithmeticError)) as refused:
        estimator(*given)
    KEPT.clear()
    assert says in str(refused.value)
    assert len(str(refused.value)) < 500


def test_evolution_needs_no_derivative_and_says_what_it_cannot_batch(generator):
    loss, _ = UNSUPPORTED["dropout"]
    training, outer_loss, meta, carry, batches = window(
        loss, (4, 4), torch.randn(2, 3, 4, generator=generator)
    )
    evolution = Evolution(("lr",), pairs=2)
    with pytest.raises(NotImplementedError, match="draws random numbers"):
        evolution(training, outer_loss, meta, evolution.init(carry, generator), batches)
