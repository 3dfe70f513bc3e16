"""Which part of an image is used, and whether it is mirrored.

The random numbers of an image depend only on the seed, the epoch and the index of the image. They
are therefore the same with any number of processes, in any order, and after a resume.
"""

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

# The share of the area and the ratio of width to height of a random part, as in the training of
# Inception (Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6).
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_TRIES = 10

_KEY = struct.Struct("<QQQQ")
_NUMBERS = struct.Struct("<5Q")


class Crop(NamedTuple):
    """A part of an image, in its pixels, and whether it is mirrored left to right."""

    left: int
    top: int
    width: int
    height: int
    flip: bool


def random_resized_crop(width: int, height: int, *, key: tuple[int, int, int], flip: bool) -> Crop:
    """Return a random part of random size and ratio, to be resized to a square.

    The share of the area is uniform in 0.08..1, and so is the logarithm of the ratio between those
    of 3/4 and 4/3. If ten such parts do not fit into the image, the largest part in its centre with
    such a ratio is taken.

    Args:
        width, height: The size of the image in pixels.
        key: The seed of the run, the epoch and the index of the image, which determine the result.
        flip: Whether to mirror the part with probability one half.
    """
    numbers = _uniform(key, 0)
    mirrored = flip and numbers[4] < 0.5
    least, most = map(math.log, _RATIO)
    for attempt in range(_TRIES):
        numbers = _uniform(key, attempt) if attempt else numbers
        area = width * height * (_AREA[0] + (_AREA[1] - _AREA[0]) * numbers[0])
        ratio = math.exp(least + (most - least) * numbers[1])
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left = int((width - across + 1) * numbers[2])
            return Crop(left, int((height - down + 1) * numbers[3]), across, down, mirrored)
    across = min(width, max(1, round(height * _RATIO[1])))
    down = min(height, max(1, round(width / _RATIO[0])))
    return Crop((width - across) // 2, (height - down) // 2, across, down, mirrored)


def random_crop(
    width: int, height: int, *, share: float, key: tuple[int, int, int], flip: bool
) -> Crop:
    """Return a square at a random position.

    Args:
        width, height, key, flip: As for ``random_resized_crop``.
        share: The side of the square as a share of the image's shorter side, in (0, 1].
    """
    side = _side(width, height, share)
    numbers = _uniform(key, 0)
    left, top = int((width - side + 1) * numbers[2]), int((height - side + 1) * numbers[3])
    return Crop(left, top, side, side, flip and numbers[4] < 0.5)


def centre_crop(width: int, height: int, *, share: float) -> Crop:
    """Return the square in the centre. The arguments are those of ``random_crop``."""
    side = _side(width, height, share)
    return Crop((width - side) // 2, (height - side) // 2, side, side, False)


def _side(width: int, height: int, share: float) -> int:
    return max(1, round(min(width, height) * share))


def _uniform(key: tuple[int, int, int], attempt: int) -> tuple[float, ...]:
    """Return five numbers in [0, 1), uniform and independent: the digest of the key.

    This takes about two microseconds, a tenth of the time to make a generator of NumPy.
    """
    digest = hashlib.blake2b(_KEY.pack(*key, attempt), digest_size=_NUMBERS.size, person=b"crop")
    # A float has 53 bits; all 64 could be rounded up to 1.
    return tuple((number >> 11) * 2.0**-53 for number in _NUMBERS.unpack(digest.digest()))


@dataclass(frozen=True)
class View:
    """How images are cropped and resized.

    Attributes:
        size: The height and width of the result, in pixels.
        resize: The length of an image's shorter side at the scale at which a square of ``size`` is
            cut out: in the centre, or at random with ``crop = "crop"``.
        crop: ``random-resized``, ``crop`` (both at random) or ``centre``.
        flip: Whether to mirror images at random, except in ``centre``.
        seed: The seed of random crops and flips.
    """

    size: int
    resize: int
    crop: str = "centre"
    flip: bool = False
    seed: int = 0

    def choose(self, width: int, height: int, epoch: int, index: int) -> Crop:
        """Return the part of an image to use in an epoch."""
        share, key = self.size / self.resize, (self.seed, epoch, index)
        if self.crop == "random-resized":
            return random_resized_crop(width, height, key=key, flip=self.flip)
        if self.crop == "crop":
            return random_crop(width, height, share=share, key=key, flip=self.flip)
        return centre_crop(width, height, share=share)
