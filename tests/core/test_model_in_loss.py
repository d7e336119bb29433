"""A loss may use all of the model that it is given, and is refused if later calls would see what it did."""

import copy
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from problems import assert_near, assert_same_bits, every, filled, moved
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from metafop import Momentum, Training, functional, tree
from metafop.hypergradients import Adjoint, autograd


class Net(nn.Module):
    """Has what models have: methods, settings, submodules, batch norm, a buffer that forward assigns to."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(decay=0.1, slope=0.5)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.head = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def encode(self, x):
        return self.body(x)

    def forward(self, x):
        features = self.encode(x)
        self.mean = 0.9 * self.mean + 0.1 * features.detach().mean(0)
        return self.head(features - self.config.slope * self.mean)


def fit(model, batch):
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def penalized(model, batch):
    return fit(model, batch) + model.config.decay * sum(p.square().sum() for p in model.parameters())


def weights_alone(model, batch):
    return fit(model, batch) + sum(p.abs().sum() for k, p in model.named_parameters() if "weight" in k)


def parts(model, batch):
    inputs, labels = batch
    return cross_entropy(model.head(model.body[0](inputs).sigmoid()), labels) + model.body[0].weight[0].sum()


def contrast(model, batch):
    first, second = model.encode(batch[0]), model.encode(batch[0].flip(0) * 1.5)
    return (first - second).square().mean() + fit(model, batch)


def with_statistics(model, batch):
    value = fit(model, batch)
    return value * (1 + model.mean.square().sum() + model.body[1].running_var.sum())


def by_kind(model, batch):
    assert isinstance(model, Net)
    assert model.training
    return fit(model, batch) * (2.0 if isinstance(model.head, nn.Linear) else 1.0)


def also_in_eval_mode(model, batch):
    model.eval()
    value = fit(model, batch)
    model.train()
    return value + fit(model, batch)


def of_changed_parameters(model, batch):
    changed = {k: 1.1 * p for k, p in model.named_parameters()}
    return cross_entropy(functional_call(model, changed, (batch[0],)), batch[1])


def after_a_step_inside(model, batch):
    def inner(params):
        buffers = {k: b.clone() for k, b in model.named_buffers()}
        return cross_entropy(functional_call(model, (params, buffers), (batch[0],)), batch[1])

    params = dict(model.named_parameters())
    return inner(tree.map(lambda p, g: p - 0.1 * g, params, grad(inner)(params)))


def with_features(model, batch):
    seen = []
    handle = model.body[0].register_forward_hook(lambda module, args, out: seen.append(out))
    value = fit(model, batch)
    handle.remove()
    return value + seen[0].square().mean()


LOSSES = {
    each.__name__: each
    for each in (
        penalized,
        weights_alone,
        parts,
        contrast,
        with_statistics,
        by_kind,
        also_in_eval_mode,
        of_changed_parameters,
    )
}
EAGER = {each.__name__: each for each in (with_features, after_a_step_inside)}  # torch.compile takes no hooks
ALL = LOSSES | EAGER


def net(generator):
    return filled(Net(), generator)


def batches(generator, n=3):
    return [
        (torch.randn(6, 3, generator=generator), torch.randint(2, (6,), generator=generator))
        for _ in range(n)
    ]


def started(model, loss):
    """Return a training of the model by the loss, meta and the first carry."""
    pure, params, buffers = functional.from_module(model, loss)
    training = Training(pure, Momentum())
    meta = training.init_meta(params, lr=0.1, momentum=0.5)
    return training, meta, training.init(params, buffers)


def assert_sees_what_torch_does(model, loss, batch):
    """Compare an evaluation with torch's of a copy: value, gradients, buffers."""
    training, meta, carry = started(model, loss)
    seen, ordinary = training.evaluate(meta, carry, batch), copy.deepcopy(model)
    value = loss(ordinary, batch)
    trained = {k: p for k, p in ordinary.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(value, list(trained.values()), materialize_grads=True)
    buffers = {k: b.detach() for k, b in ordinary.named_buffers()}
    theirs = (value.detach(), dict(zip(trained, grads, strict=True)), buffers)
    assert_near(tuple(seen), theirs, rtol=1e-12)


@every("loss", ALL)
def test_a_loss_may_use_all_of_the_model(loss, generator):
    assert_sees_what_torch_does(net(generator), loss, batches(generator)[0])


def assert_right_through_steps(estimator, model, loss, generator):
    """Compare a hypergradient with that of the whole graph."""
    *inner, outer = batches(generator)
    training, meta, carry = started(model, loss)

    def outer_loss(carry):
        return training.loss(carry.params, carry.buffers, outer)[0]

    problem = training, outer_loss, meta, carry, inner
    ours, oracle = estimator(*problem), autograd(*problem)
    results = [(each.value, each.grads, each.carry) for each in (ours, oracle)]
    assert_near(*results, rtol=1e-12, size=1.0)
    assert oracle.grads.hyper.lr.abs() > 1e-3


@every("loss", ALL)
@pytest.mark.parametrize("over", ["reverse", "forward"])
def test_second_derivatives_go_through_all_of_the_model(over, loss, generator):
    assert_right_through_steps(Adjoint(over=over), net(generator), loss, generator)


def test_compiled_adjoints_go_through_all_of_the_model(generator):
    def loss(model, batch):
        features = model[0](batch[0]).tanh() * model.scale
        return cross_entropy(model[1](features), batch[1]) + sum(p.square().sum() for p in model.parameters())

    model = filled(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), generator)
    model.register_buffer("scale", torch.tensor(0.7))
    assert_right_through_steps(Adjoint(compile=True), model, loss, generator)


@every("loss", LOSSES)
def test_vmap_over_parameters_is_a_loop(loss, generator):
    (batch,) = batches(generator, 1)
    training, meta, carry = started(net(generator), loss)
    starts = [moved(carry.params, generator) for _ in range(3)]

    def after(params):
        return training.step(meta, training.init(params, carry.buffers), batch)

    assert_near(vmap(after)(tree.stack(starts)), tree.stack([after(p) for p in starts]), rtol=1e-12, size=1.0)


@every("loss", LOSSES)
def test_a_compiled_step_is_the_step(loss, generator):
    (batch,) = batches(generator, 1)
    training, meta, carry = started(net(generator), loss)
    torch.compiler.reset()
    step = torch.compile(training.step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_near(step(meta, carry, batch), training.step(meta, carry, batch), rtol=1e-12, size=1.0)
        carry, _ = training.step(meta, carry, batch)


def tied(model):
    model.body[0], model.head = nn.Linear(3, 4), nn.Linear(4, 4)
    model.body.append(nn.Linear(4, 4))
    model.body[3].weight = model.head.weight
    return model


def same_module_twice(model):
    model.body.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    model.body.append(model.body[3])
    return model


def partly_frozen(model):
    model.body[0].requires_grad_(False)
    return model


def parametrized(norm):
    def made(model):
        norm(model.head)
        return model

    return made


MODELS = {
    "tied": tied,
    "one module twice": same_module_twice,
    "frozen": partly_frozen,
    "weight norm": parametrized(weight_norm),
    "spectral norm": parametrized(spectral_norm),
    "in eval mode": lambda model: model.eval(),
}


@every("loss", {"penalized": penalized, "parts": parts, "with_statistics": with_statistics})
@every("change", MODELS)
def test_models_of_all_kinds_may_be_used_whole(change, loss, generator):
    assert_sees_what_torch_does(filled(change(Net()), generator), loss, batches(generator)[0])


def test_names_are_those_of_the_model(generator):
    model = net(generator)
    names = []

    def loss(model, batch):
        names.append((set(dict(model.named_parameters())), set(dict(model.named_buffers()))))
        return fit(model, batch)

    training, meta, carry = started(model, loss)
    training.evaluate(meta, carry, batches(generator)[0])
    assert names == [(set(dict(model.named_parameters())), set(dict(model.named_buffers())))]
    assert names == [(carry.params.keys(), carry.buffers.keys())]


def test_a_loss_may_be_computed_inside_itself_and_in_threads(generator):
    (batch,) = batches(generator, 1)
    pure, params, buffers = functional.from_module(net(generator), penalized)

    def nested(model, batch):
        value, _ = pure({k: 2 * p for k, p in params.items()}, buffers, batch)
        return value + penalized(model, batch)

    once, _, _ = functional.from_module(net(generator), nested)
    starts = [moved(params, generator) for _ in range(4)]
    alone = [once(p, buffers, batch) for p in starts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda p: [once(p, buffers, batch) for _ in range(20)], starts))
    assert_same_bits(together, [20 * [each] for each in alone])


def to_eval(model):
    model.eval()


def part_to_eval(model):
    model.body[1].eval()


def replaced_module(model):
    model.head = nn.Linear(4, 2)


def added_module(model):
    model.body.append(nn.Identity())


def added_parameter(model):
    model.head.scale = nn.Parameter(torch.ones(()))


def removed_parameter(model):
    weight = model.head.weight
    del model.head.weight
    model.head.weight = weight


def added_buffer(model):
    model.body.register_buffer("mask", torch.ones(4))


def hooked(model):
    model.body[0].register_forward_hook(lambda module, args, out: 2 * out)


def hooked_before(model):
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def half(model):
    model.half()


def moved_part(model):
    model.body.to("cpu")


REFUSED = {
    "mode": (to_eval, r"leaves the model in eval mode.* Switch back .* from_module\(model\.eval\(\), …\)\.$"),
    "mode of a part": (part_to_eval, r"leaves the module 'body\.1' in eval mode"),
    "replaced module": (replaced_module, r"leaves the model with other submodules .*before from_module"),
    "added module": (added_module, "leaves the module 'body' with other submodules than before"),
    "added parameter": (added_parameter, "leaves the module 'head' with other parameters than before"),
    "removed parameter": (removed_parameter, "leaves the module 'head' with other parameters than before"),
    "added buffer": (
        added_buffer,
        r"leaves the module 'body' with other buffers .* call the model once before",
    ),
    "half": (half, r"converts the parameters .*half\(\).* Convert the model before from_module"),
    "to, of a part": (moved_part, r"converts the parameters .* in the loss what the model returns\.$"),
    "hook": (hooked, r"leaves the module 'body\.0' with other hooks .*Remove each by its handle before"),
    "hook before": (hooked_before, "leaves the model with other hooks than before"),
}


class Acting:
    """A loss that does something to the model before it computes, or after, while it `acts`."""

    def __init__(self, does, after=False):
        self.does, self.after, self.acts = does, after, False

    def __call__(self, model, batch):
        if self.acts and not self.after:
            self.does(model)
        value = fit(model, batch)
        if self.acts and self.after:
            self.does(model)
        return value


def assert_later_calls_do_not_see(loss, context, generator):
    """Compare evaluations before and after some in which the loss acts, within the context."""
    (batch,) = batches(generator, 1)
    training, meta, carry = started(partly_frozen(net(generator)), loss)
    expected = training.evaluate(meta, carry, batch)
    for _ in range(2):
        loss.acts = True
        with context():
            training.evaluate(meta, carry, batch)
        loss.acts = False
        assert_same_bits(training.evaluate(meta, carry, batch), expected)


@every("does, says", REFUSED)
@every("after", {"before": False, "after": True})
def test_what_later_calls_would_see_is_refused_and_they_do_not_see_it(does, says, after, generator):
    refused = partial(pytest.raises, ValueError, match=says)
    assert_later_calls_do_not_see(Acting(does, after), refused, generator)


def test_a_loss_that_fails_leaves_nothing_behind(generator):
    def does(model):
        model.eval()
        raise KeyError("in the loss")

    assert_later_calls_do_not_see(Acting(does), partial(pytest.raises, KeyError), generator)


def replaced_activation(model):
    model.body[2] = nn.Identity()


@every("does", {"mode": to_eval, "replaced module": replaced_activation})
def test_a_compiled_step_never_sees_what_an_earlier_one_left(does, generator):
    (batch,) = batches(generator, 1)
    model, loss = net(generator), Acting(does, after=True)
    loss.acts = True
    (training, meta, carry), (pure, _, _) = started(model, loss), started(model, fit)
    torch.compiler.reset()
    step = torch.compile(training.step, fullgraph=True, backend="aot_eager")
    assert_near(step(meta, carry, batch), pure.step(meta, carry, batch), rtol=1e-12, size=1.0)
    with pytest.raises(Exception, match="The loss leaves the mod"):
        step(meta, carry, batch)


def without_gradient(model):
    with torch.no_grad():
        model.head.weight.mul_(2)


def by_data(model):
    model.head.weight.data.mul_(2)


def loading(model):
    model.load_state_dict({k: torch.zeros_like(x) for k, x in model.state_dict().items()})


@every("writes", {"without gradient": without_gradient, "by data": by_data, "loading": loading})
def test_a_loss_that_writes_into_the_parameters_of_the_call_is_refused(writes, generator):
    loss = Acting(writes)
    loss.acts = True
    training, meta, carry = started(net(generator), loss)
    with pytest.raises(ValueError, match=r"The loss writes into the parameter '(head|body)\."):
        training.evaluate(meta, carry, batches(generator)[0])


def test_a_loss_that_writes_into_frozen_parameters_is_refused(generator):
    def loss(model, batch):
        with torch.no_grad():
            model.body[0].weight.mul_(0.9)
        return fit(model, batch)

    (batch,) = batches(generator, 1)
    training, meta, carry = started(partly_frozen(net(generator)), loss)
    with pytest.raises(NotImplementedError, match=r"writes in place .* frozen parameter"):
        training.evaluate(meta, carry, batch)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"frozen parameter 'body\.0\.weight', .* Make it a buffer"):
            training.loss(carry.params, carry.buffers, batch)


def no_gradients(model):
    model.requires_grad_(False)


def new_data(model):
    model.head.weight.data = torch.zeros(2, 4)


@every("does", {"requires_grad_": no_gradients, "data": new_data})
def test_what_torch_refuses_in_a_derivative_leaves_nothing_behind(does, generator):
    refused = partial(pytest.raises, RuntimeError, match="functorch transform|freeze parameters before")
    assert_later_calls_do_not_see(Acting(does), refused, generator)


def new_parameter(model):
    model.head.weight = nn.Parameter(torch.ones(2, 4))


@every("does", {"zero_grad": lambda model: model.zero_grad(), "parameter": new_parameter})
def test_what_is_without_effect_on_later_calls_is_allowed(does, generator):
    assert_later_calls_do_not_see(Acting(does), nullcontext, generator)
