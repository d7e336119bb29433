"""Runs of a small network on generated images: a few seconds, and one second."""

from dataclasses import replace

from experiments.vision.methods import Method
from experiments.vision.task import Classify

TASK = Classify(
    method=Method("fop", 0.05),
    seed=3,
    data="generated",
    images=320,
    validation=64,
    test=64,
    model="all-conv",
    widths=(2, 4),
    epochs=6,
    decays=(2.5,),
    batch=16,
    keep_matrices=True,
)
SHORT = replace(TASK, epochs=1, keep_matrices=False)
