"""ImageSet: labelled images of one size in memory, as the files of a data set store them."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fineprune.errors import InputError, shown

# Images are converted to float64 in chunks of this many, which is fast and takes little memory.
_CHUNK = 1024


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images of one size, all of them in memory.

    Attributes:
        images: uint8, shape (N, channels, height, width), values 0..255.
        labels: int64, shape (N,), values 0..len(classes) - 1.
        classes: The name of each class.

    Raises:
        InputError: A dtype, a shape or a label does not fit this description.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise InputError(
                "expected images as uint8 of shape (N, channels, height, width), got "
                f"{_describe(self.images)}: convert them to values 0..255 first"
            )
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise InputError(
                f"expected labels as int64 of shape (N,), got {_describe(self.labels)}: "
                "give one class number for each image"
            )
        if len(self.labels) != len(self.images):
            raise InputError(
                f"expected as many labels as images, got {len(self.labels)} labels for "
                f"{len(self.images)} images: give one class number for each image"
            )
        if len(self.labels) and not (
            int(self.labels.min()) >= 0 and int(self.labels.max()) < len(self.classes)
        ):
            raise InputError(
                f"expected labels 0..{len(self.classes) - 1} for {len(self.classes)} classes, got "
                f"{int(self.labels.min())}..{int(self.labels.max())}: name every class"
            )

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, index: Tensor) -> "ImageSet":
        """Return a copy of some images, in the given order.

        Args:
            index: The indices of the images; int64, shape (M,).

        Raises:
            InputError: An index is outside 0..N - 1, or ``index`` has another dtype or shape.
        """
        if index.dtype != torch.int64 or index.ndim != 1:
            raise InputError(
                f"expected an index as int64 of shape (M,), got {_describe(index)}: "
                "give the numbers of the images to take"
            )
        if len(index) and not (int(index.min()) >= 0 and int(index.max()) < len(self)):
            raise InputError(
                f"expected indices 0..{len(self) - 1}, got {int(index.min())}..{int(index.max())}: "
                "take images that the set has"
            )
        return ImageSet(self.images[index], self.labels[index], self.classes)


def class_number(place: str, text: str, classes: Sequence[str]) -> int:
    """Return the number of the class that a text names.

    Args:
        place: Where the text comes from, for the error message.
        text: The name of a class, or its number. A name counts first, if it looks like a number.
        classes: The name of each class.

    Raises:
        InputError: There is no such class.
    """
    numbers = {str(number): number for number in range(len(classes))}
    numbers |= {name: number for number, name in enumerate(classes)}
    if text not in numbers:
        near = difflib.get_close_matches(text, classes, n=1, cutoff=0.0) or [classes[0]]
        raise InputError(
            f"expected the name or number (0..{len(classes) - 1}) of a class in {place}, got "
            f"{shown(text)}: did you mean {near[0]!r}?"
        )
    return numbers[text]


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel over all images and pixels.

    Args:
        images: uint8, shape (N, channels, height, width).

    Returns:
        (mean, std), one float per channel, computed from values scaled to 0..1. The standard
        deviation is that of the whole population (the sum is divided by the number of pixels).

    Raises:
        InputError: The images have another dtype or shape, or there are none.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.numel() == 0:
        raise InputError(
            "expected at least one image as uint8 of shape (N, channels, height, width), got "
            f"{_describe(images)}: compute the statistics from the training images"
        )
    channels = images.shape[1]
    total = torch.zeros(channels, dtype=torch.float64)
    squares = torch.zeros(channels, dtype=torch.float64)
    for first in range(0, len(images), _CHUNK):
        # Sums of whole numbers below 2**53 are exact in float64, so the chunks change nothing.
        values = images[first : first + _CHUNK].cpu().to(torch.float64)
        total += values.sum(dim=(0, 2, 3))
        squares += values.square().sum(dim=(0, 2, 3))
    pixels = images.numel() // channels
    mean = total / pixels
    variance = (squares / pixels - mean.square()).clamp_min(0.0)
    std = variance.sqrt()
    return tuple((mean / 255).tolist()), tuple((std / 255).tolist())


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
