"""`penalties` runs from its command; a penalty for each weight is the single one where all are equal."""

import pytest
import torch
from commands import smoke
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.__main__ import main
from experiments.studies.penalties import digits, regression
from experiments.studies.penalties.digits import Sizes
from metafop.hypergradients import adjoint

SIZES = Sizes(training=50, validation=100, held=50, test=64)


def test_penalties_compares_them_with_a_single_one_split_by_split(tmp_path):
    summary, text = smoke("penalties", tmp_path)
    assert summary["penalties_splits"] == 2
    assert 0 <= summary["penalties_splits_ahead"] <= 2
    assert summary["each_loss"] == pytest.approx(summary["single_loss"], abs=0.01)
    assert "| single penalty, learned | " in text
    assert (tmp_path / "penalties.png").stat().st_size > 10_000
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("held/split 2")[-1].step == 2


def test_the_parts_of_a_split_have_no_digit_in_common():
    split = digits.split("generated-digits", None, SIZES, seed=3)
    assert [len(x.labels) for x in split] == [50, 100, 50, 64]
    rows = torch.cat([x.images for x in split])
    assert len(rows.unique(dim=0)) == len(rows)
    other = digits.split("generated-digits", None, SIZES, seed=4)
    assert not torch.equal(split.training.images, other.training.images)
    assert torch.equal(split.test.images, other.test.images)


def test_equal_penalties_train_as_the_single_one_and_their_derivatives_add_up():
    task = regression.regression(lr=0.1, momentum=0.9, steps=5)
    split = digits.split("generated-digits", None, SIZES, seed=0)
    single, each = torch.tensor(0.1), torch.full(regression.SHAPE, 0.1)
    torch.testing.assert_close(task.trained(each, split.training), task.trained(single, split.training))

    def outer_loss(carry):
        return regression.error(carry.params, split.validation)

    carry, batches = task.training.init(task.start), task.steps * [split.training]
    of_single, of_each = (
        adjoint(task.training, outer_loss, task.penalized(l2), carry, batches).grads.loss["l2"]
        for l2 in (single, each)
    )
    torch.testing.assert_close(of_each.sum(), of_single)


def test_more_digits_than_there_are_is_refused():
    with pytest.raises(SystemExit, match=r"generated-digits has 512 training and 256 test digits; 10500 to"):
        main(["penalties", "--source", "generated-digits"])
