"""Synthetic images, made of noise and one pattern per class, to measure speed without data."""

import torch

from fineprune.datasets.image_set import ImageSet

_SEED = 20170612
_PATTERN = 4


def make_synthetic(
    train_size: int, *, size: int = 32, classes: int = 10
) -> tuple[ImageSet, ImageSet]:
    """Make images from which a network can learn a little; they are the same in every call.

    Each class has a coarse pattern of 4x4 colours, and an image is the pattern of its class plus
    noise of about the same strength. Accuracies on these images mean nothing. The training and the
    test set have images of shape (n, 3, size, size); the latter has a fifth as many.
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
