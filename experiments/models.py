"""The networks of the paper."""

from itertools import pairwise

from torch import nn


def mlp(*widths: int) -> nn.Sequential:
    """Return a fully connected net with ReLU between layers: 784-100-100-100-10 in the paper's appendix."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def all_conv(narrow: int = 96, wide: int = 192, channels: int = 3, classes: int = 10) -> nn.Sequential:
    """Return the 9-layer all-convolutional net (Springenberg et al., 2014), with batch norm after each layer.

    Seven 3×3 layers, the third and the sixth with stride 2, then two 1×1 layers and the mean over positions.
    """
    plan = [
        (channels, narrow, 3, 1),
        (narrow, narrow, 3, 1),
        (narrow, narrow, 3, 2),
        (narrow, wide, 3, 1),
        (wide, wide, 3, 1),
        (wide, wide, 3, 2),
        (wide, wide, 3, 1),
        (wide, wide, 1, 1),
    ]
    layers: list[nn.Module] = []
    for inputs, outputs, size, stride in plan:
        conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.Conv2d(wide, classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)
