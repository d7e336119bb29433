"""Images that need no files, for short runs: a smooth pattern for each class, under noise."""

import torch
from torch import Generator, Tensor
from torch.nn.functional import interpolate

from experiments.data.images import Dataset, Images

CONTRAST = 12.0  # deviation of a pattern where it is drawn, of 255
NOISE = 64.0  # deviation of each pixel around it
GRAIN = 4  # a pattern is drawn at one pixel in so many, each way


def generated(
    shape: tuple[int, int, int] = (3, 16, 16),
    classes: int = 10,
    training: int = 512,
    test: int = 256,
    seed: int = 0,
) -> Dataset:
    """Return images of a shape (channels, height, width) that are learned from a few hundred, not at once."""
    generator = Generator().manual_seed(seed)
    channels, height, width = shape

    def normal(*size: int) -> Tensor:
        # In one precision, as the same seed draws other numbers in another.
        return torch.randn(size, generator=generator, dtype=torch.float32)

    coarse = normal(classes, channels, -(-height // GRAIN), -(-width // GRAIN))
    patterns = interpolate(coarse, size=(height, width), mode="bilinear")

    def draw(count: int) -> Images:
        labels = torch.randint(classes, (count,), generator=generator)
        values = 128 + CONTRAST * patterns[labels] + NOISE * normal(count, *shape)
        return Images(values.clamp(0, 255).to(torch.uint8), labels)

    return Dataset(draw(training), draw(test))
