"""A folder knows its run by numbers: of the start, of the batches, and of what the losses return."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from problems import assert_same_bits, batch_loss, convnet, every

from metafop import Adam, Momentum, Online, Training, functional
from metafop.hypergradients import adjoint
from metafop.hypergradients.evolution import Evolution
from metafop.hypergradients.forward import Forward
from metafop.meta_training import Trained, meta_train
from metafop.unrolled import Unrolled

ESTIMATORS = {"adjoint": adjoint, "forward": Forward(), "evolution": Evolution(("lr",), pairs=2)}


class Fixed:
    """Episodes that are all alike, of a task that tells nothing of itself."""

    def __init__(self, start, batches, outer_loss):
        self.start = lambda episode: start
        self.batches = lambda episode, window: batches
        self.outer_loss = lambda episode, window: outer_loss


def bowl(params, batch):
    return (params["w"] - batch).square().sum()


def away(carry):
    return (carry.params["w"] - 1).square().sum()


def run(
    folder,
    loss=bowl,
    outer_loss=away,
    batches=None,
    w=None,
    buffers=None,
    estimator: Any = adjoint,
    seed=0,
    tower=False,
    steps=2,
) -> Trained:
    """Train on a loss of `w`, with everything new but what is told."""
    lifted = functional.plain(lambda params, batch: loss(params, batch))
    training = Training(lifted, Momentum())
    params = {"w": torch.tensor([0.5, -0.3, 0.0]) if w is None else w}
    meta, start = training.init_meta(params, lr=0.01), training.init(params, buffers)
    if tower:
        online = Online(training, Adam(), learn=("lr",))
        meta, start = online.init_meta(meta, lr=0.01), online.init(meta, start)
        training = online
    if isinstance(estimator, Forward):
        start = estimator.init(start)
    if isinstance(estimator, Evolution):
        start = estimator.init(start, torch.Generator().manual_seed(seed))
    learner = Unrolled(training, Adam(), estimator=estimator)
    outer_meta = learner.init_meta(meta, lr=0.1)
    batches = batches or [torch.tensor([0.1, 0.2, 0.3]), torch.ones(3), torch.tensor([0.3, 0.2, 0.1])]
    task = Fixed(start, batches, lambda carry: outer_loss(carry))
    return meta_train(learner, outer_meta, meta, task, steps, folder=folder, save_every=1)


def assert_differs(words, folder, first, second):
    """Two runs of the same form are told apart, each way round, and each goes on with its own."""
    for one, other, place in ((first, second, folder / "one"), (second, first, folder / "other")):
        run(place, **one)
        with pytest.raises(ValueError, match=rf"{place} holds a run that differs in {words}\. Pass another"):
            run(place, **other, steps=3)
        assert_same_bits(run(place, **one, steps=3).state, run(None, **one, steps=3).state)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


zeros, ones = numbers(0, 0, 0), numbers(1, 1, 1)
PAIRS = {
    "another loss": ("loss", {}, {"loss": lambda params, batch: (params["w"] - batch).abs().sum()}),
    "a loss one part in a thousand larger": (
        "loss",
        {"w": ones},
        {"w": ones, "loss": lambda params, batch: 1.001 * bowl(params, batch)},
    ),
    "losses whose values and gradients agree at the start": (
        "loss",
        {"w": zeros, "loss": lambda params, batch: params["w"].square().sum()},
        {"w": zeros, "loss": lambda params, batch: params["w"].sin().square().sum()},
    ),
    "losses that agree on the first batch": (
        "loss",
        {"loss": lambda params, batch: bowl(params, batch)},
        {"loss": lambda params, batch: bowl(params, batch.sort().values)},
    ),
    "another outer loss": ("outer loss", {}, {"outer_loss": lambda carry: away(carry).sqrt()}),
    "outer losses that agree at the start": (
        "outer loss",
        {"w": zeros, "outer_loss": lambda carry: carry.params["w"].sum()},
        {"w": zeros, "outer_loss": lambda carry: carry.params["w"].sin().sum()},
    ),
    "both losses": (
        "loss and outer loss",
        {},
        {"loss": lambda params, batch: 2 * bowl(params, batch), "outer_loss": lambda carry: 2 * away(carry)},
    ),
    "another first batch": ("batches", {}, {"batches": [zeros, ones, numbers(0.3, 0.2, 0.1)]}),
    "another last batch": ("batches", {}, {"batches": [numbers(0.1, 0.2, 0.3), ones, zeros]}),
    "batches in another order": (
        "batches",
        {"batches": [numbers(1.0, 2.0, 3.0)]},
        {"batches": [numbers(3.0, 2.0, 1.0)]},
    ),
    "more batches": ("batches", {"batches": 2 * [zeros]}, {"batches": 3 * [zeros]}),
    "other parameters": ("start", {}, {"w": numbers(0.5, -0.3, 1e-6)}),
    "parameters in another order": ("start", {}, {"w": numbers(-0.3, 0.5, 0.0)}),
    "other buffers": ("start", {"buffers": {"b": zeros}}, {"buffers": {"b": ones}}),
    "particles of another seed": (
        "start",
        {"estimator": ESTIMATORS["evolution"]},
        {"estimator": ESTIMATORS["evolution"], "seed": 1},
    ),
}


@every("words, first, second", PAIRS)
def test_what_has_the_same_form_is_told_apart_by_its_numbers(words, first, second, tmp_path):
    assert_differs(words, tmp_path, first, second)


@pytest.mark.parametrize("changed", ["loss", "outer loss"])
@pytest.mark.parametrize("tower", [False, True], ids=["training", "online"])
@every("estimator", ESTIMATORS)
def test_losses_are_told_apart_in_every_kind_of_carry(estimator, tower, changed, tmp_path):
    form = {"estimator": estimator, "tower": tower}
    others = {"loss": lambda p, b: 2 * bowl(p, b), "outer loss": lambda carry: 2 * away(carry)}
    assert_differs(changed, tmp_path, form, form | {changed.replace(" ", "_"): others[changed]})


@dataclass(frozen=True)
class WithOuterLoss:
    """A task that prints as another with a function of the same form."""

    training: Training
    outer: Any

    def start(self, episode):
        return self.training.init({"w": torch.ones(2)})

    def batches(self, episode, window):
        return [torch.zeros(2)]

    def outer_loss(self, episode, window):
        return lambda carry: self.outer(carry.params["w"])


def test_another_function_in_the_attributes_of_a_task_is_told_apart(tmp_path):
    training = Training(functional.plain(bowl), Momentum())
    meta = training.init_meta({"w": torch.ones(2)}, lr=0.01)
    learner = Unrolled(training, Adam())
    outer_meta = learner.init_meta(meta, lr=0.1)
    first, second = WithOuterLoss(training, lambda w: w.sum()), WithOuterLoss(training, lambda w: w.prod())
    meta_train(learner, outer_meta, meta, first, 1, folder=tmp_path)
    with pytest.raises(ValueError, match="differs in outer loss"):
        meta_train(learner, outer_meta, meta, second, 2, folder=tmp_path)


def summed(problem, backwards):
    """Return a training whose loss takes the examples of a batch from either end."""

    def loss(model, batch):
        return batch_loss(model, tuple(x.flip(0) for x in batch) if backwards else batch)

    return Training(functional.from_module(problem.model, loss)[0], Momentum())


def test_rounding_is_no_difference(precision, generator, tmp_path):
    problem = convnet(generator, bias=True)  # before batch norm, where the gradient of a bias is rounding
    start, histories, grads = summed(problem, False).init(problem.params, problem.buffers), [], []
    for backwards, steps in ((False, 1), (True, 2)):
        training = summed(problem, backwards)
        learner, meta = Unrolled(training, Adam()), training.init_meta(problem.params, lr=0.01)
        outer_meta = learner.init_meta(meta, lr=0.1)

        def outer_loss(carry, training=training):
            return training.loss(carry.params, carry.buffers, problem.batches[0])[0]

        task = Fixed(start, problem.batches, outer_loss)
        trained = meta_train(learner, outer_meta, meta, task, steps, folder=tmp_path)
        histories.append(trained.history)
        grads.append(training.evaluate(meta, start, problem.batches[0]).grads)
    assert any(not torch.equal(grads[0][k], grads[1][k]) for k in problem.params)
    assert histories[1][:1] == histories[0]


def edge(c):
    """Return a loss that is finite at 1, and not finite at most places near it."""
    return lambda params, batch: (c - params["w"].square()).sqrt().sum() + 0 * batch.sum()


def test_a_loss_that_is_finite_at_the_start_alone_is_told_by_that(tmp_path):
    assert_differs("loss", tmp_path, {"w": ones, "loss": edge(1.0001)}, {"w": ones, "loss": edge(1.0002)})


@every(
    "what, changed",
    {
        "loss": ("loss", {"loss": lambda params, batch: bowl(params, batch) * torch.nan}),
        "gradient": ("loss", {"loss": lambda params, batch: (0 * params["w"]).sqrt().sum()}),
        "outer loss": ("outer loss", {"outer_loss": lambda carry: away(carry) / 0}),
    },
)
def test_a_loss_that_is_not_finite_at_the_start_has_no_folder(what, changed, tmp_path):
    with pytest.raises(ValueError, match=f"the {what} or its gradient is not finite.* folder=None"):
        run(tmp_path, **changed)
    assert len(run(None, **changed).history) == 2


def test_batches_of_any_kind_are_no_trouble(tmp_path):
    batch = {
        "x": torch.tensor([1.0, torch.nan, torch.inf]),
        "name": "first",
        "complex": torch.ones(2, dtype=torch.complex64),
        "sparse": torch.eye(2).to_sparse(),
        "labels": torch.arange(3),
        "flags": torch.tensor([True, False]),
    }

    def loss(params, batch):
        return bowl(params, batch["labels"])

    run(tmp_path, loss, batches=[batch])
    assert len(run(tmp_path, loss, batches=[batch], steps=3).history) == 3
    with pytest.raises(ValueError, match="differs in batches"):
        run(tmp_path, loss, batches=[batch | {"complex": 2j * torch.ones(2)}])


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 1, 1, 3]], ids=str)
def test_every_batch_of_the_first_window_and_their_order_count(order, tmp_path):
    batches = [torch.full((3,), float(i)) for i in range(4)]
    run(tmp_path, batches=batches)
    with pytest.raises(ValueError, match="differs in batches"):
        run(tmp_path, batches=[batches[i] for i in order])
