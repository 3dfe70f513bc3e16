"""Handwritten digits that this package contains: real images without a download.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository (1998), https://doi.org/10.24432/C50P49, under CC BY 4.0. ``digits.npz`` holds its test
part in the order of scikit-learn's ``load_digits``.
"""

from pathlib import Path

import numpy as np
import torch

from fineprune.datasets.image_set import ImageSet
from fineprune.errors import InputError

_IMAGES = 1797
_SPLIT_SEED = 20180521
_ENLARGE = 4


def load_digits(train_size: int = 1024) -> tuple[ImageSet, ImageSet]:
    """Return 1,797 digits as a training and a test set of images of shape (n, 3, 32, 32).

    The values 0..16 of the original 8x8 pixels are scaled to 0..255; each pixel is repeated 4x4
    times, and the channel three times, so that networks for CIFAR accept them. All images are
    shuffled once with a fixed seed: the first ``train_size`` are for training, the others for
    testing. A smaller training set is therefore a part of a larger one.
    """
    if not 1 <= train_size < _IMAGES:
        raise InputError(
            f"expected train_size in 1..{_IMAGES - 1}, got {train_size}: "
            f"there are {_IMAGES} digits, and the others are the test set"
        )
    with np.load(Path(__file__).with_name("digits.npz")) as arrays:
        pixels, targets = arrays["pixels"], arrays["labels"].astype(np.int64)
    small = np.rint(pixels * (255 / 16)).astype(np.uint8)
    large = small.repeat(_ENLARGE, axis=1).repeat(_ENLARGE, axis=2)
    images = torch.from_numpy(large)[:, None].repeat(1, 3, 1, 1)
    labels = torch.from_numpy(targets)
    digits = ImageSet(images, labels, tuple(str(name) for name in range(10)))

    # RandomState, because NumPy promises never to change its stream, unlike that of Generator, and
    # results are compared across versions.
    shuffled = torch.from_numpy(np.random.RandomState(_SPLIT_SEED).permutation(_IMAGES))
    shuffled = shuffled.to(torch.int64)
    return digits.subset(shuffled[:train_size]), digits.subset(shuffled[train_size:])
