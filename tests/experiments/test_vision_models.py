"""The networks are those of the literature."""

import torch

from experiments.vision import models


def test_resnet18_has_as_many_parameters_as_in_the_literature():
    assert sum(p.numel() for p in models.resnet18().parameters()) == 11_173_962
    assert models.resnet18(width=2)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
