"""The handwritten digits that come inside scikit-learn: real images without a download."""

import numpy as np
import torch

from fineprune.datasets.image_set import ImageSet
from fineprune.errors import InputError

_IMAGES = 1797
_SPLIT_SEED = 20180521
_ENLARGE = 4


def load_digits(train_size: int = 1024) -> tuple[ImageSet, ImageSet]:
    """Load 1,797 digits as images of shape (3, 32, 32) and split them.

    The originals are 8x8 with values 0..16 (the test part of the UCI "Optical Recognition of
    Handwritten Digits" data). They are scaled to 0..255, each pixel is repeated 4x4 times and the
    one channel three times, so that the networks for CIFAR take them as they are.

    The split is always the same, whatever a run's seed: all images are shuffled once by a
    generator of a fixed seed, the first ``train_size`` are for training and the rest for testing.
    A smaller training set is therefore part of a larger one.

    Args:
        train_size: number of training images, 1..1796.

    Returns:
        (train, test), each with images of shape (n, 3, 32, 32).

    Raises:
        InputError: ``train_size`` leaves no image for training or none for testing.
    """
    if not 1 <= train_size < _IMAGES:
        raise InputError(
            f"expected train_size in 1..{_IMAGES - 1}, got {train_size}: "
            f"the digits are {_IMAGES} images and the rest is for testing"
        )
    # Imported here because scikit-learn takes a second to load and only the digits need it.
    from sklearn import datasets

    source = datasets.load_digits()
    small = np.rint(np.asarray(source.images) * (255 / 16)).astype(np.uint8)
    large = small.repeat(_ENLARGE, axis=1).repeat(_ENLARGE, axis=2)
    images = torch.from_numpy(large)[:, None].repeat(1, 3, 1, 1)
    labels = torch.from_numpy(np.asarray(source.target).astype(np.int64))
    digits = ImageSet(images, labels, tuple(str(name) for name in range(10)))

    # RandomState, because NumPy promises never to change its stream; it makes no such promise
    # for Generator, and results are compared across versions.
    shuffled = torch.from_numpy(np.random.RandomState(_SPLIT_SEED).permutation(_IMAGES))
    shuffled = shuffled.to(torch.int64)
    return digits.subset(shuffled[:train_size]), digits.subset(shuffled[train_size:])
