"""`cleaning` runs from its command; its digits, its budgets and its measures are what they say."""

import pytest
import torch
from commands import smoke
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.functional import one_hot

from experiments.data import Dataset, Images
from experiments.studies.cleaning import agreement, runs
from experiments.studies.cleaning.config import Config, MetaRates, Net
from experiments.studies.cleaning.methods import methods
from experiments.studies.cleaning.problem import CLASSES, accuracy, digits, f1, logits, problem

METHODS = ("online", "truncated", "unrolled", "implicit")


def numbered(count):
    """Return images that are easy to tell apart by class; the last pixels are the number of the image."""
    labels = torch.arange(count) % CLASSES
    number = (torch.arange(count)[:, None] >> torch.arange(10)) & 1
    images = 255 * torch.cat([one_hot(labels, CLASSES), number], 1)
    return Images(images.to(torch.uint8)[:, None], labels)


@pytest.fixture
def drawn(generator):
    return digits(Dataset(numbered(400), numbered(50)), 200, generator)


@pytest.fixture
def begun(drawn, generator):
    return problem(drawn, (), 1.0, generator)


def test_smoke_writes_what_it_says(tmp_path):
    summary, tables = smoke("cleaning", tmp_path)
    for net in ("linear", "mlp"):
        for method in METHODS:
            assert (
                0 <= summary[f"{net}_{method}_accuracy_worst"] <= summary[f"{net}_{method}_accuracy"] <= 100
            )
            assert 0 <= summary[f"{net}_{method}_f1"] <= 1
            assert summary[f"{net}_{method}_spent"] <= 60
            above = summary[f"{net}_{method}_accuracy"] - summary[f"{net}_validation_anew"]
            assert summary[f"{net}_{method}_above_validation_alone"] == pytest.approx(above)
        assert 0 <= summary[f"{net}_all_anew_stopped"] <= 100
    assert -1 <= summary["implicit_cosine"] <= 1
    assert summary["implicit_time_ratio_with_run"] > summary["implicit_time_ratio"] > 0
    assert "| online |" in tables
    assert "| the validation digits alone |" in tables
    assert (tmp_path / "cleaning.png").stat().st_size > 10_000
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("accuracies/mlp/online")[-1].step == 100


def test_half_the_labels_are_wrong_exactly_and_no_digit_is_both_learned_from_and_validated_by(drawn):
    true = drawn.training[0][:, :CLASSES].argmax(1)
    assert drawn.wrong.sum() == 100
    assert torch.equal(drawn.training[1] != true, drawn.wrong)
    assert torch.equal(drawn.validation[1], drawn.validation[0][:, :CLASSES].argmax(1))
    both = torch.cat([drawn.training[0], drawn.validation[0]])
    assert len(both.unique(dim=0)) == 400


def test_too_many_examples_are_refused(generator):
    with pytest.raises(SystemExit, match=r"400 training images, and --examples 201 asks for 402"):
        digits(Dataset(numbered(400), numbered(50)), 201, generator)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_finds_wrong_labels_within_its_budget(name, begun):
    net = Net(unrolled_lr=1.0, meta_rates=MetaRates(0.1, 0.5, 1.0, 0.5))
    method = methods(Config(horizon=20), net, begun)[name]
    run = runs.learned(method, begun, 500)
    assert 400 < run.spent <= 500
    assert run.f1 > 0.95
    assert run.accuracy == 100


def test_a_gradient_is_the_unit_and_a_step_online_takes_more_of_them(begun):
    pixels, examples = 20, 200
    assert runs.gradient_flops(begun) == 2 * 2 * pixels * CLASSES * examples
    run = runs.learned(methods(Config(), Net(), begun)["online"], begun, 100)
    assert 3 < run.spent / run.steps < 5  # training, validation, and a second derivative


def test_weights_of_a_set_that_is_trained_on_have_a_mean_of_one(drawn):
    batch, weights = runs.together(
        [drawn.training, drawn.validation], [torch.full((200,), 0.25), torch.ones(200)]
    )
    assert len(batch[0]) == len(batch[1]) == 400
    torch.testing.assert_close(weights, torch.tensor([0.4, 1.6]).repeat_interleave(200))


def test_implicit_agrees_with_the_adjoint_where_a_run_ends_at_a_minimum(begun):
    found = agreement.measured(begun, 500)
    assert found.cosine > 0.9999
    assert found.distance < 1e-3


def test_f1_and_accuracy_count(begun, drawn):
    wrong = torch.tensor([True, True, True, False])
    assert f1(torch.tensor([0.1, 0.2, 0.7, 0.3]), wrong) == pytest.approx(2 / 3)
    images = drawn.test[0]
    labels = logits(begun.carry.params, images).argmax(1)
    labels[:10] = (labels[:10] + 1) % CLASSES
    assert accuracy(begun.carry.params, (images, labels)) == pytest.approx(80)
