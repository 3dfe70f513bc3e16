"""Images made up from noise and a pattern for each class: for measuring speed without data."""

import torch

from fineprune.datasets.image_set import ImageSet

_SEED = 20170612
_PATTERN = 4


def make_synthetic(
    train_size: int, *, size: int = 32, classes: int = 10
) -> tuple[ImageSet, ImageSet]:
    """Make images that a network can learn a little from, always the same ones.

    Each class has a coarse pattern of 4x4 colours; an image is its class's pattern under noise of
    about the same strength. Nothing measured on them says anything about accuracy.

    Args:
        train_size: number of training images; the test set has a fifth as many, at least one.
        size: height and width in pixels.
        classes: number of classes.

    Returns:
        (train, test), each with images of shape (n, 3, size, size).
    """
    generator = torch.Generator().manual_seed(_SEED)
    shape = (classes, 3, _PATTERN, _PATTERN)
    coarse = torch.randint(0, 128, shape, generator=generator, dtype=torch.uint8)
    place = torch.arange(size) * _PATTERN // size
    patterns = coarse[:, :, place][:, :, :, place]

    def make(number: int) -> ImageSet:
        labels = torch.randint(0, classes, (number,), generator=generator)
        shape = (number, 3, size, size)
        noise = torch.randint(0, 128, shape, generator=generator, dtype=torch.uint8)
        names = tuple(str(name) for name in range(classes))
        return ImageSet(noise.add_(patterns[labels]), labels, names)

    return make(train_size), make(max(1, train_size // 5))
