"""A run keeps its folder wherever its code is moved to: finished runs are found again."""

from pathlib import Path

import pytest

from experiments.paper.bipedal.ppo import Settings
from experiments.paper.bipedal.task import BipedalTask
from experiments.runner.runs import folder_of
from experiments.vision.imagenet_task import ImageNetTask, ImageSet
from experiments.vision.methods import Method
from experiments.vision.step_timing import Timing
from experiments.vision.task import Classify

CLASSIFY = Classify(
    method=Method("fop", 0.05, meta_lr=1e-3),
    seed=3,
    data="cifar10",
    images=10_000,
    validation=5000,
    test=10_000,
    model="all-conv",
    widths=(16, 32),
    epochs=15,
    decays=(10.5,),
    batch=128,
)
IMAGENET = ImageNetTask(
    method=Method("momentum", 0.1),
    seed=1,
    found=ImageSet(4000, 1000, 10, "0123456789abcdef"),
    epochs=12,
    decays=(5.0, 10.0),
    size=64,
    width=16,
    batch=128,
    weight_decay=1e-4,
    half=True,
)
BIPEDAL = BipedalTask(
    method="fop",
    lr=3e-4,
    seed=2,
    terrain="rough",
    landscape=0,
    steps=500_000,
    environments=8,
    ppo=Settings(),
    through="optim",
    scored=20,
)
# The names were computed by the code at version 0.1, before its modules were moved into packages.
FOLDERS = {
    "fop-lr0.05-meta0.001-seed3-014ab1cc": CLASSIFY,
    "momentum-seed1-b91abe89": IMAGENET,
    "rough-fop-seed2-f616f964": BIPEDAL,
    "timing-2812e483": Timing(CLASSIFY, (Method("momentum", 0.1), Method("fop", 0.05)), 12),
    "timing-8b911cfb": Timing(IMAGENET, (Method("momentum", 0.1), Method("fop", 0.1)), 6),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_folder_of_a_run_is_the_one_it_always_had(name):
    assert folder_of(FOLDERS[name], Path("out")) == Path("out") / "runs" / name
