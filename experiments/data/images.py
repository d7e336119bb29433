"""Images and what they show: what every dataset is."""

from typing import NamedTuple

from torch import Tensor


class Images(NamedTuple):
    """Images (n, channels, height, width), as bytes, and the class of each (n,), as int64."""

    images: Tensor
    labels: Tensor


class Dataset(NamedTuple):
    """Images to train on, and images to test by."""

    training: Images
    test: Images
