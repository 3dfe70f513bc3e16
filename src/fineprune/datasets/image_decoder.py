"""Decodes a part of an image and resizes it: bytes of a file to pixels of one size.

JPEG files are decoded by simplejpeg if it is installed, and all others by Pillow; both use
libjpeg-turbo with the same settings and give the same pixels. A JPEG image that is at least twice
as large as needed is decoded at a half, a quarter or an eighth of its size, which takes less time.

Pixels are resized by torch, bilinear with antialiasing, as by ``Image.resize`` of Pillow. Colours
become RGB, with eight bits each. The orientation that a camera writes into a file (EXIF) is not
applied.
"""

import contextlib
import importlib
import io
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from fineprune.datasets.image_crops import Crop
from fineprune.errors import check_installed, first_line

# Returns the part to use of an image with this width and height.
Choose = Callable[[int, int], Crop]

Pixels = npt.NDArray[np.uint8]

_FORMATS = ("JPEG", "PNG", "WEBP")
_JPEG_START = b"\xff\xd8\xff"
_SCALES = (8, 4, 2)

# Each thread decodes JPEG images of up to so many bytes into the same memory. New memory would take
# the operating system up to a third as long as the decoding.
_LARGEST_BUFFER = 1 << 24
_BUFFERS = threading.local()

# Pillow refuses larger images, which a damaged header may announce.
_MOST_PIXELS = 178_956_970


class BrokenImage(ValueError):
    """The bytes are not an image that can be decoded."""


def decode(content: bytes, choose: Choose, size: int) -> torch.Tensor:
    """Decode a JPEG, PNG or WebP file, cut out a part, resize it; uint8, shape (3, size, size)."""
    if not content:
        raise BrokenImage("the file is empty")
    fast = _simplejpeg()
    if fast is not None and content.startswith(_JPEG_START):
        # Pillow decides on what is damaged, or of a kind that it does not support (CMYK).
        with contextlib.suppress(ValueError):
            return _decode_jpeg(fast, content, choose, size)
    return _decode_any(content, choose, size)


def check_decoder() -> None:
    """Raise InputError if no decoder is installed."""
    check_installed("PIL", "Pillow to decode images", "images")


def _decode_jpeg(fast: Any, content: bytes, choose: Choose, size: int) -> torch.Tensor:
    height, width, _, _ = fast.decode_jpeg_header(content)
    if height * width > _MOST_PIXELS:
        raise ValueError(f"expected at most {_MOST_PIXELS} pixels, got {height} x {width}")
    crop = choose(width, height)
    scale = _scale(crop, size)
    rows, columns = -(-height // scale), -(-width // scale)
    least = {} if scale == 1 else {"min_height": rows, "min_width": columns}
    pixels = fast.decode_jpeg(content, **least, min_factor=1, buffer=_buffer(rows * columns * 3))
    left, top, right, bottom = _box(crop, round(width / pixels.shape[1]))
    return _resized(pixels[top:bottom, left:right], size, crop.flip)


def _buffer(size: int) -> bytearray | None:
    """Return memory of at least ``size`` bytes, the same in each call; None if it is too much."""
    if size > _LARGEST_BUFFER:
        return None
    buffer: bytearray | None = getattr(_BUFFERS, "memory", None)
    if buffer is None or len(buffer) < size:
        buffer = _BUFFERS.memory = bytearray(size)
    return buffer


def _decode_any(content: bytes, choose: Choose, size: int) -> torch.Tensor:
    check_decoder()
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size
            crop = choose(width, height)
            scale = _scale(crop, size)
            if scale > 1:  # Only the decoder of JPEG can do this; the others ignore it.
                image.draft("RGB", (width // scale, height // scale))
            whole = _eight_bits(image) if image.mode.startswith("I") else image
            part = whole.crop(_box(crop, round(width / image.size[0])))
            pixels = np.array(part if part.mode == "RGB" else part.convert("RGB"))
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise BrokenImage("no JPEG, PNG or WebP image") from error
    except Exception as error:  # Each decoder has errors of its own for damaged files.
        raise BrokenImage(first_line(error) or repr(error)) from error
    return _resized(pixels, size, crop.flip)


def _eight_bits(image: Any) -> Any:
    """Return the eight highest bits of 16 or, in an image with values below 4096, of 12.

    Pillow would make all values above 255 white.
    """
    from PIL import Image

    values = np.asarray(image)
    shift = 4 if values.max(initial=0) < 1 << 12 else 8
    return Image.fromarray((values >> shift).astype(np.uint8))


def _scale(crop: Crop, size: int) -> int:
    """Return by how much an image can be reduced so that the part has at least the wanted size."""
    return next((scale for scale in _SCALES if min(crop.width, crop.height) >= scale * size), 1)


def _box(crop: Crop, scale: int) -> tuple[int, int, int, int]:
    """Return the corners of a part (left, top, right, bottom) in an image that was reduced."""
    right, bottom = crop.left + crop.width, crop.top + crop.height
    return crop.left // scale, crop.top // scale, right // scale, bottom // scale


def _resized(pixels: Pixels, size: int, flip: bool) -> torch.Tensor:
    source = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if source.shape[2:] == (size, size):
        # A copy, because the part would keep the memory of the whole image.
        result = source.clone(memory_format=torch.contiguous_format)
    else:
        result = F.interpolate(source, (size, size), mode="bilinear", antialias=True)
    # Mirroring takes a few microseconds with separate channels, and 100 if they are interleaved.
    return result[0].flip(2) if flip else result[0]


@cache
def _simplejpeg() -> Any:
    """Return the module simplejpeg; None if it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None
