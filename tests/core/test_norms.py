"""Norms written out are torch's, and right where those are not: thrice differentiated, or through vmap."""

import pytest
import torch
from problems import assert_near, assert_same_bits, every
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap

from metafop import tree
from metafop.norms import NormsWrittenOut

LAYERS = {
    "batch": (lambda: nn.BatchNorm2d(3), (4, 3, 2, 5)),
    "batch, without statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (4, 3)),
    "batch, without weights": (lambda: nn.BatchNorm1d(3, affine=False, momentum=0.3, eps=0.1), (4, 3, 5)),
    "batch, in eval mode": (lambda: nn.BatchNorm2d(3).eval(), (4, 3, 2, 5)),
    "layer": (lambda: nn.LayerNorm(5), (4, 3, 5)),
    "layer, two dimensions": (lambda: nn.LayerNorm([3, 5], eps=0.1), (4, 3, 5)),
    "layer, without bias": (lambda: nn.LayerNorm(5, bias=False), (4, 5)),
    "layer, without weights": (lambda: nn.LayerNorm(5, elementwise_affine=False), (4, 5)),
    "instance": (lambda: nn.InstanceNorm2d(3), (4, 3, 2, 5)),
    "instance, with all": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (4, 3, 5)),
    "instance, in eval mode": (lambda: nn.InstanceNorm1d(3, track_running_stats=True).eval(), (4, 3, 5)),
}


def made(make, shape, generator):
    """Return a layer whose numbers are random, and an input."""
    layer = make()
    with torch.no_grad():
        for x in (*layer.parameters(), *layer.buffers()):
            if x.is_floating_point():
                x.copy_(0.5 + torch.rand(x.shape, generator=generator))
    return layer, torch.randn(shape, generator=generator)


def evaluated(layer, x, written_out):
    """Return what a layer makes of x, its derivatives, and its buffers after that."""
    params, buffers = dict(layer.named_parameters()), {k: b.clone() for k, b in layer.named_buffers()}
    given = {"x": x, **params}
    given = {k: p.detach().requires_grad_() for k, p in given.items()}

    def run(given):
        return functional_call(layer, {k: p for k, p in given.items() if k != "x"} | buffers, (given["x"],))

    if written_out:
        with NormsWrittenOut():
            value = run(given)
    else:
        value = run(given)
    grads = torch.autograd.grad(value.sin().sum(), list(given.values()))
    return value.detach(), grads, buffers


@every("make, shape", LAYERS)
def test_they_are_torchs_and_so_are_running_statistics(make, shape, generator):
    layer, x = made(make, shape, generator)
    value, grads, buffers = evaluated(layer, x, written_out=True)
    expected, d_expected, after = evaluated(layer, x, written_out=False)
    assert_near(value, expected, rtol=1e-13)
    assert_near(list(grads), list(d_expected), rtol=1e-12, size=1.0)
    assert_same_bits(buffers, after)


DIRECT = {
    "batch": lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, True),
    "batch, in eval mode": lambda x, w, b: torch.batch_norm(
        x, w, b, torch.zeros(3), torch.ones(3), False, 0.1, 1e-5, True
    ),
    "instance": lambda x, w, b: torch.instance_norm(x, w, b, None, None, True, 0.1, 1e-5, True),
    "layer": lambda x, w, b: torch.layer_norm(x.mT, (3,), w, b, 1e-5),
    "layer, without weights": lambda x, w, b: torch.layer_norm(x.mT, (3,)),
}


@every("norm", DIRECT)
def test_so_are_those_that_are_called_directly(norm, generator):
    x, w, b = torch.randn(4, 3, 5, generator=generator), *torch.rand(2, 3, generator=generator)
    with NormsWrittenOut():
        found = vjp(vmap(grad(lambda w: norm(w[:, None] * x, w, b).pow(3).sum())), w[None])[1](w[None])
    expected = vjp(grad(lambda w: norm(w[:, None] * x, w, b).pow(3).sum()), w)[1](w)
    assert_near(found[0][0], expected[0], rtol=1e-11, size=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_in_low_precision_they_are_as_precise(dtype, generator):
    layer, x = made(lambda: nn.LayerNorm(5), (4, 3, 5), generator)
    layer, x = layer.to(dtype), (x + 10).to(dtype)
    with NormsWrittenOut():
        value = layer(x)
    exact = layer.double()(x.double())
    assert value.dtype == dtype
    assert (value - exact).abs().max() <= 2 * (layer.to(dtype)(x) - exact).abs().max()


def loss_of(layer, x):
    """Return a loss of the layer's weights and of what its input is multiplied by."""

    def loss(given):
        params = {k: p for k, p in given.items() if k != "scale"}
        zero = torch.zeros_like(given["scale"].detach().sum())  # vmap writes only into what it maps over
        buffers = {k: b + zero.to(b.dtype) for k, b in layer.named_buffers()}
        return functional_call(layer, params | buffers, ((given["scale"] * x).sin(),)).square().sin().sum()

    return loss, {"scale": 1 + 0.1 * x[:1], **{k: p.detach() for k, p in layer.named_parameters()}}


@every("make, shape", LAYERS)
def test_the_derivative_of_a_gradient_through_vmap_is_that_of_a_loop(make, shape, generator):
    layer, x = made(make, shape, generator)
    loss, given = loss_of(layer, x)
    several = tree.map(lambda p: p + 0.1 * torch.randn(3, *p.shape, generator=generator), given)
    along = tree.map(lambda p: torch.randn(p.shape, generator=generator), several)
    with NormsWrittenOut():
        (found,) = vjp(vmap(grad(loss)), several)[1](along)
    expected = [
        vjp(grad(loss), tree.map(lambda p, k=k: p[k], several))[1](tree.map(lambda v, k=k: v[k], along))[0]
        for k in range(3)
    ]
    assert_near(found, tree.stack(expected), rtol=1e-11, size=1e-3)


@every("make, shape", LAYERS)
def test_the_third_derivative_is_that_of_a_difference(make, shape, generator):
    layer, x = made(make, shape, generator)
    loss, given = loss_of(layer, x)
    u, v = (tree.map(lambda p: torch.randn(p.shape, generator=generator), given) for _ in range(2))

    def second(given):
        return vjp(grad(loss), given)[1](v)[0]

    with NormsWrittenOut():
        third = jvp(second, (given,), (u,))[1]
    ahead, behind = (second(tree.map(lambda p, u, h=h: p + h * u, given, u)) for h in (1e-5, -1e-5))
    difference = tree.map(lambda a, b: (a - b) / 2e-5, ahead, behind)
    assert_near(third, difference, rtol=1e-6, size=1e-2)
