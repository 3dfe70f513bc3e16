"""What a page shows of a sample: a small picture, or a text."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

# Larger pictures are reduced to this height and width, and longer texts to this many characters.
LARGEST, _MOST_TEXT = 96, 2000

# The entries of a sample that is a dict in which a picture or a text is looked for, in this order.
_NAMES = ("image", "img", "pixel_values", "text", "sentence", "x", "input")


def view_of(item: Any) -> tuple[str | None, str | None]:
    """Return how to show a sample: a picture as a data URI, or a text.

    A picture is an image of Pillow, or a tensor or array of shape (height, width), (1 or 3, height,
    width) or (height, width, 1 or 3). Whole numbers of 0..255 stay as they are; other pictures are
    scaled so that the smallest number is black and the largest is white. Everything else is shown
    as text.
    """
    if isinstance(item, tuple | list) and item:
        return view_of(item[0])
    if isinstance(item, dict):
        found = next((name for name in _NAMES if name in item), None)
        return view_of(item[found]) if found else (None, _short(str(item)))
    if isinstance(item, str | bytes):
        return None, _short(item if isinstance(item, str) else item.decode("utf-8", "replace"))
    if hasattr(item, "thumbnail") and hasattr(item, "convert"):
        if getattr(item, "mode", "")[:1] not in ("I", "F"):
            return _of_pillow(item), None
        # Pillow would clip values above 255 instead of scaling them.
        item = np.asarray(item).astype(np.float32)
    try:
        pixels = _pixels(item)
    except (TypeError, ValueError, RuntimeError):  # Torch has no such numbers, or they are nested.
        pixels = None
    if pixels is None:
        return None, _short(str(item))
    return _uri("png", png(pixels)), None


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return pixels, uint8, shape (height, width, 1 or 3), as the bytes of a PNG file."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # A row starts with filter 0.
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _of_pillow(image: Any) -> str:
    transparent = image.has_transparency_data
    small = image.convert("RGBA" if transparent else "RGB")
    small.thumbnail((LARGEST, LARGEST))
    if transparent:  # On grey, which shows black and white.
        ground = small.copy()
        ground.paste("grey", (0, 0, *small.size))
        ground.alpha_composite(small)
        small = ground.convert("RGB")
    file = io.BytesIO()
    small.save(file, "WEBP", quality=90)
    return _uri("webp", file.getvalue())


def _pixels(item: Any) -> npt.NDArray[np.uint8] | None:
    """Return a tensor or array as a small picture, (height, width, 1 or 3); None if it is none."""
    if isinstance(item, np.ndarray):
        # A copy, since torch takes no negative strides and warns of read-only arrays.
        item = np.array(item)
    elif not isinstance(item, torch.Tensor):
        return None
    values = torch.as_tensor(item).detach().cpu()
    if values.is_complex():
        return None
    if values.ndim == 2:
        values = values[None]
    elif values.ndim == 3 and values.shape[0] not in (1, 3) and values.shape[2] in (1, 3):
        values = values.movedim(2, 0)
    if values.ndim != 3 or values.shape[0] not in (1, 3) or min(values.shape[1:]) < 4:
        return None
    whole = not values.is_floating_point()
    values = values.float().nan_to_num()
    whole = whole and float(values.min()) >= 0 and float(values.max()) <= 255
    factor = LARGEST / max(values.shape[1:])
    if factor < 1:
        size = [max(1, round(side * factor)) for side in values.shape[1:]]
        values = F.interpolate(values[None], size, mode="bilinear", antialias=True)[0]
    if not whole:
        least, most = values.min(), values.max()
        values = (values - least) / (most - least).clamp(min=1e-12) * 255
    return values.round().clamp(0, 255).byte().movedim(0, 2).contiguous().numpy()


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} …"


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
