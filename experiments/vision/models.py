"""The networks of the paper."""

from itertools import pairwise

from torch import Tensor, nn


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


class BasicBlock(nn.Module):
    """Two 3×3 layers, and a shortcut around them: a 1×1 layer where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.body(inputs) + self.shortcut(inputs)).relu()


def resnet18(width: int = 64, channels: int = 3, classes: int = 10, large: bool = False) -> nn.Sequential:
    """Return ResNet-18 (He et al., 2016): as it is used for small images, or as published, for `large` ones.

    The first layer is 3×3, or for large images 7×7 with stride 2, and pooled over 3×3 with stride 2. After it
    come four pairs of blocks, each pair after the first of twice the channels at half the size.
    """
    size, stride = (7, 2) if large else (3, 1)
    first = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    layers: list[nn.Module] = [first, nn.BatchNorm2d(width), nn.ReLU()]
    if large:
        layers += [nn.MaxPool2d(3, 2, padding=1)]
    for inputs, outputs, stride in [(1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)]:  # in widths
        layers += [BasicBlock(inputs * width, outputs * width, stride)]
        layers += [BasicBlock(outputs * width, outputs * width, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))
