"""The training loop: methods are paired by seed, test images wait for the end, divergence ends a run."""

from dataclasses import replace

import pytest
from vision_tasks import SHORT

from experiments.runner import study
from experiments.vision import loop
from experiments.vision.methods import METHODS, Method

pytestmark = pytest.mark.usefixtures("single_precision")


def test_a_run_that_diverges_ends_there_and_says_so(tmp_path):
    [run] = study.carry_out([replace(SHORT, method=Method("momentum", 1e30))], tmp_path, workers=1)
    assert run.result["diverged"]
    assert run.result["validation_loss"] is None
    assert len(run.metrics()["step"]) <= 20


@pytest.mark.parametrize("name", METHODS)
def test_within_a_seed_every_method_starts_from_the_same_network_and_batch(name, tmp_path):
    tasks = [replace(SHORT, method=Method(each, 0.01)) for each in ("momentum", name)]
    first, other = (run.metrics()["loss"][0] for run in study.carry_out(tasks, tmp_path, workers=1))
    assert first == other


def test_the_test_images_are_evaluated_in_the_end_only_and_not_at_all_while_tuning(tmp_path, monkeypatch):
    seen = []
    figures = loop.Loop._figures

    def spied(self, name, batches):
        if batches is not None:
            seen.append(name)
        return figures(self, name, batches)

    monkeypatch.setattr(loop.Loop, "_figures", spied)
    study.carry_out([replace(SHORT, epochs=2)], tmp_path, workers=1)
    assert seen == ["validation", "validation", "validation", "test"]
    seen.clear()
    study.carry_out([replace(SHORT, epochs=2, test=0)], tmp_path, workers=1)
    assert "test" not in seen


def test_no_two_methods_share_a_colour():
    assert len({method.colour for method in METHODS.values()}) == len(METHODS)
