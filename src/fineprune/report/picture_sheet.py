"""Picture sheets: many small pictures in one image, which a page embeds as a data URI.

A sheet is much smaller than one image per picture, and a browser decodes it only when the part of
the page that shows it is opened.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

Index = npt.NDArray[np.int64]

# The number of pictures side by side.
COLUMNS = 20

# Larger pictures are reduced to this height and width, in pixels.
_LARGEST = 96

# The qualities of WebP, the best first. Below the last one, photographs cannot be recognised.
_QUALITIES = (80, 65, 50, 35, 25)

# Sheets are stored without loss if this takes at most this share of the bytes.
_LOSSLESS_SHARE = 0.1


@dataclass(frozen=True)
class Sheet:
    """One image that holds many pictures of equal size, row by row.

    Attributes:
        uri: The image, as a data URI.
        rows: The number of rows, of ``COLUMNS`` pictures each.
    """

    uri: str
    rows: int


def picture_sheets(
    pictures: npt.NDArray[np.uint8], parts: Sequence[Index], most_bytes: int
) -> list[Sheet]:
    """Return one sheet for each part, in the best quality that fits.

    If the lowest quality does not fit either, there are sheets for the first parts only.

    Args:
        pictures: The pictures; uint8, shape (N, 1 or 3, height, width).
        parts: The indices of the pictures of each sheet.
        most_bytes: The largest size of all URIs together.
    """
    if not parts:
        return []
    sheets = _fitting(pictures, parts, int(_LOSSLESS_SHARE * most_bytes), None)
    largest, total = max(parts, key=len), sum(len(part) for part in parts)
    for quality in _QUALITIES:
        if len(sheets) == len(parts):
            break
        # One sheet tells about how large all of them are, so most qualities need not be tried.
        expected = len(_sheet(pictures[largest], quality).uri) * total / len(largest)
        if expected <= most_bytes or quality == _QUALITIES[-1]:
            sheets = _fitting(pictures, parts, most_bytes, quality)
    return sheets


def shown_size(pictures: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Return the width and height that the pictures have in a sheet, in pixels."""
    height, width = pictures.shape[2:]
    factor = min(1.0, _LARGEST / max(height, width))
    return max(1, round(width * factor)), max(1, round(height * factor))


def _fitting(
    pictures: npt.NDArray[np.uint8], parts: Sequence[Index], most_bytes: int, quality: int | None
) -> list[Sheet]:
    """Return the sheets of the first parts that fit; without loss if there is no quality."""
    sheets: list[Sheet] = []
    for part in parts:
        sheet = _sheet(pictures[part], quality)
        most_bytes -= len(sheet.uri)
        if most_bytes < 0:
            break
        sheets.append(sheet)
    return sheets


def _sheet(pictures: npt.NDArray[np.uint8], quality: int | None) -> Sheet:
    width, height = shown_size(pictures)
    rows = -(-len(pictures) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * width, rows * height))
    for number, picture in enumerate(pictures):
        pixels = picture.transpose(1, 2, 0) if len(picture) == 3 else picture[0]
        row, column = divmod(number, COLUMNS)
        image = Image.fromarray(np.ascontiguousarray(pixels))
        if image.size != (width, height):
            image = image.resize((width, height))
        sheet.paste(image, (column * width, row * height))
    file = io.BytesIO()
    if quality is None:
        sheet.save(file, "WEBP", lossless=True)
    else:
        sheet.save(file, "WEBP", quality=quality)
    return Sheet("data:image/webp;base64," + base64.b64encode(file.getvalue()).decode(), rows)
