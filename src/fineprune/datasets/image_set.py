"""ImageSet: labelled images of one size in memory, as the files of a data set store them."""

import difflib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fineprune.errors import InputError, shown

# Images are converted to float64 in chunks of this many, which is fast and takes little memory.
_CHUNK = 1024
# An error names at most so many classes.
_MOST_NAMED = 20


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images of one size, all of them in memory.

    Attributes:
        images: uint8, shape (N, channels, height, width), values 0..255.
        labels: int64, shape (N,), values 0..len(classes) - 1.
        classes: The name of each class.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, index: Tensor) -> "ImageSet":
        """Return a copy of the images with these indices (int64, shape (M,)), in their order."""
        return ImageSet(self.images[index], self.labels[index], self.classes)


def class_number(place: str, text: str, classes: Sequence[str], others: Sequence[str] = ()) -> int:
    """Return the number of the class that a text names.

    Args:
        place: Where the text comes from, for the error message.
        text: The name of a class, or its number. A name counts first, if it looks like a number; a
            number that may be the name of another class without its zeros is refused.
        others: What else may stand there, for the error message.
    """
    numbers = {str(number): number for number in range(len(classes))}
    numbers |= {one_form(name): number for number, name in enumerate(classes)}
    number = numbers.get(one_form(text))
    if number is None:
        known = [*classes, *others]
        number_like = text.lstrip("-").isdecimal()  # A similar number is no guess.
        near = [] if number_like else difflib.get_close_matches(text, known, n=1)
        some = ", ".join(known if len(known) <= _MOST_NAMED else [*known[:_MOST_NAMED], "..."])
        raise InputError(
            f"expected the name or number (0..{len(classes) - 1}) of a class in {place}, got "
            f"{shown(text)}: " + (f"did you mean {near[0]!r}?" if near else f"it may be {some}")
        )
    if text.isdecimal() and text not in classes:  # A spreadsheet writes 3 for the class 03.
        same = next((name for name in classes if (name.lstrip("0") or "0") == str(number)), None)
        if same not in (None, classes[number]):
            raise InputError(
                f"expected the name of a class in {place}, got {text}, which is the name {same} "
                f"without its zeros or the number of class {classes[number]}: write the name"
            )
    return number


def one_form(text: str) -> str:
    """Return a text in one Unicode form: systems write letters with accents in different ones."""
    return unicodedata.normalize("NFC", text)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel over all images and pixels.

    They are those of values scaled to 0..1, of at least one uint8 image, shape (N, channels,
    height, width); the standard deviation is that of the whole population.
    """
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
