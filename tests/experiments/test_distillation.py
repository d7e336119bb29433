"""`distillation` runs from its command, and learns images with which a network trains better."""

from dataclasses import replace

import pytest
import torch
from commands import smoke
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.studies.distillation import config, learning, problem


@pytest.mark.usefixtures("single_precision")
def test_distillation_tests_every_setting_from_the_known_start_and_from_new_ones(tmp_path):
    summary, tables = smoke("distillation", tmp_path)
    for setting in ("mean", "fixed", "random"):
        assert 0 <= summary[f"{setting}_known"] <= 100
        assert summary[f"{setting}_fresh_worst"] <= summary[f"{setting}_fresh"]
    assert summary["compiled_time_vs_compiled"] == 1.0
    assert "| learned for any start |" in tables
    assert (tmp_path / "distillation.png").stat().st_size > 10_000
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("loss/random")[-1].step == 5
    assert [at.step for at in events.Scalars("accuracy/fixed")] == [2, 5]
    assert "curve/rates/mean" in events.Tags()["images"]


@pytest.mark.usefixtures("single_precision")
def test_the_images_and_the_rates_that_are_to_be_learned_move_and_no_others(generator):
    settings = replace(config.PRESETS["smoke"], meta_steps=40, steps=5, look_every=1)
    given = problem.make_problem(settings)
    learned = {
        name: learning.learn(settings, given, setting, learning.adjoint, generator, lambda _: None)
        for name, setting in learning.SETTINGS.items()
    }
    torch.testing.assert_close(learned["mean"].meta.loss["images"], problem.means(given))
    for found in learned.values():
        assert (found.meta.hyper.lr > 0).all()
        assert (found.meta.hyper.lr != settings.lr).all()
    assert learned["fixed"].losses[-5:].mean() < learned["fixed"].losses[:5].mean()


def test_one_new_start_is_refused():
    with pytest.raises(ValueError, match=r"fresh=1\. Pass 2 or more"):
        config.Config(fresh=1)
