"""Decoded image files are those of Pillow, and crops have the distribution that they claim."""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_images import encoded
from PIL import Image

from fineprune.datasets import image_decoder
from fineprune.datasets.image_crops import (
    Crop,
    View,
    centre_crop,
    random_crop,
    random_resized_crop,
)
from fineprune.datasets.image_decoder import BrokenImage, decode


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request, monkeypatch):
    """Decode JPEG files with either library."""
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(image_decoder, "_simplejpeg", lambda: None)


def smooth(height, width, block=8):
    """Return an image without details that are much smaller than ``block`` pixels."""
    shape = (height // block, width // block, 3)
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))


def by_pillow(content, crop, size):
    image = Image.open(io.BytesIO(content)).convert("RGB")
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    image = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if crop.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image).astype(int)


def decoded(content, crop, size):
    pixels = decode(content, lambda width, height: crop, size)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, size, size)
    assert pixels.is_contiguous()
    return pixels.permute(1, 2, 0).numpy().astype(int)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"subsampling": 0}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"quality": 30}),
        ("PNG", {}),
        ("WEBP", {}),
    ],
)
@pytest.mark.parametrize(
    "crop",
    [
        Crop(0, 0, 96, 60, False),
        Crop(5, 3, 40, 50, True),
        Crop(70, 40, 10, 12, False),
        Crop(32, 16, 32, 32, True),  # It has the wanted size, so nothing is resized.
    ],
)
@pytest.mark.usefixtures("decoder")
def test_pixels_are_those_of_pillow(kind, options, crop):
    content = encoded(smooth(64, 96), kind, **options)
    assert np.abs(decoded(content, crop, 32) - by_pillow(content, crop, 32)).max() <= 1


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.usefixtures("decoder")
def test_a_large_image_is_decoded_at_a_smaller_scale_with_almost_the_same_pixels(
    scale, monkeypatch
):
    content = encoded(smooth(261, 397, 8 * scale), "JPEG", quality=95)
    crop = Crop(31, 3, scale * 32, scale * 32, True)
    sizes = []
    resized = image_decoder._resized

    def seen(pixels, size, flip):
        sizes.append(pixels.shape[:2])
        return resized(pixels, size, flip)

    monkeypatch.setattr(image_decoder, "_resized", seen)
    difference = np.abs(decoded(content, crop, 32) - by_pillow(content, crop, 32))
    assert sizes == [(32, 32)]
    # Pixels move by less than one pixel of the smaller image.
    moved = crop._replace(left=crop.left - scale)
    without = np.abs(decoded(content, moved, 32) - by_pillow(content, crop, 32))
    assert difference.mean() < 0.7 * without.mean()
    aligned = crop._replace(left=32, top=8)
    exact = np.abs(decoded(content, aligned, 32) - by_pillow(content, aligned, 32))
    assert exact.mean() < 3


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "P", "LA", "1", "I;16"])
@pytest.mark.usefixtures("decoder")
def test_all_kinds_of_colours_become_rgb(mode):
    grey = np.asarray(Image.fromarray(smooth(32, 32)).convert("L"))
    file = io.BytesIO()
    if mode == "I;16":
        Image.fromarray(grey.astype(np.uint16) * 257).save(file, "PNG")
    else:
        kind = "JPEG" if mode in ("L", "CMYK") else "PNG"
        if mode == "1":
            grey = (grey > 127).astype(np.uint8) * 255
        image = Image.fromarray(grey).convert("RGB")
        (image.quantize(256) if mode == "P" else image.convert(mode)).save(file, kind)
    pixels = decoded(file.getvalue(), Crop(0, 0, 32, 32, False), 32)
    assert np.abs(pixels.mean(axis=2) - grey).mean() < 3


@pytest.mark.parametrize(("most", "shift"), [(4095, 4), (65535, 8)])
def test_of_more_than_8_bits_the_highest_are_kept_in_every_part(most, shift):
    values = np.linspace(0, most, 64 * 64).astype(np.uint16).reshape(64, 64)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    for top in (0, 32):  # The dark half alone does not look as if it had fewer bits.
        pixels = decoded(file.getvalue(), Crop(0, top, 32, 32, False), 32)
        np.testing.assert_array_equal(pixels[:, :, 0], values[top : top + 32, :32] >> shift)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: b"", "the file is empty"),
        (lambda content: b"GIF89a" + content, "no JPEG, PNG or WebP image"),
        (lambda content: content[: len(content) // 2], "truncated|could not create decoder"),
        (lambda content: content[:30], "."),
        (lambda content: content[:3] + b"x" * 300, "."),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.usefixtures("decoder")
def test_a_damaged_image_is_an_error_of_one_line(damage, said, kind):
    content = damage(
        encoded(np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8), kind)
    )
    with pytest.raises(BrokenImage, match=said) as raised:
        decode(content, lambda width, height: Crop(0, 0, 32, 32, False), 32)
    assert "BytesIO" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("decoder")
def test_a_header_that_announces_a_huge_image_is_damaged():
    content = bytearray(encoded(smooth(64, 96), "JPEG"))
    size = content.index(b"\xff\xc0") + 5
    content[size : size + 4] = b"\xff\x00\xff\x00"
    with pytest.raises(BrokenImage, match="exceeds limit"):
        decode(bytes(content), lambda width, height: Crop(0, 0, 32, 32, False), 32)


keys = st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 100_000), st.integers(0, 2**40))
sides = st.integers(1, 5000)


@given(width=sides, height=sides, share=st.floats(0.01, 1), key=keys, flip=st.booleans())
def test_a_crop_lies_in_the_image(width, height, share, key, flip):
    for crop in (
        random_resized_crop(width, height, key=key, flip=flip),
        random_crop(width, height, share=share, key=key, flip=flip),
        centre_crop(width, height, share=share),
    ):
        assert crop.width >= 1
        assert crop.height >= 1
        assert 0 <= crop.left <= width - crop.width
        assert 0 <= crop.top <= height - crop.height
        assert flip or not crop.flip


def test_random_resized_crops_have_the_standard_distribution():
    width, height = 500, 375
    crops = [random_resized_crop(width, height, key=(3, 1, i), flip=True) for i in range(20_000)]
    areas = np.array([crop.width * crop.height / (width * height) for crop in crops])
    ratios = np.array([math.log(crop.width / crop.height) for crop in crops])
    small = [crop for crop in crops if crop.width < width - 100 and crop.height < height - 100]
    lefts = np.array([(crop.left + 0.5) / (width - crop.width + 1) for crop in small])
    tops = np.array([(crop.top + 0.5) / (height - crop.height + 1) for crop in small])
    # The same numbers from a plain implementation: draw, and reject what does not fit.
    rng = np.random.default_rng(0)
    area = rng.uniform(0.08, 1, 400_000)
    ratio = np.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3), len(area)))
    fits = np.sqrt(area * ratio * width * height) <= width
    fits &= np.sqrt(area / ratio * width * height) <= height
    for found, expected in (
        (areas, area[fits]),
        (ratios, np.log(ratio[fits])),
        (lefts, rng.uniform(size=100_000)),
        (tops, rng.uniform(size=100_000)),
    ):
        quantiles = np.linspace(0.05, 0.95, 19)
        spread = expected.std()
        difference = np.quantile(found, quantiles) - np.quantile(expected, quantiles)
        assert np.abs(difference).max() < 5 * spread / math.sqrt(len(found))
    assert abs(np.mean([crop.flip for crop in crops]) - 0.5) < 0.02
    assert abs(np.corrcoef(lefts, tops)[0, 1]) < 0.03


def test_an_image_into_which_no_part_fits_is_cropped_in_its_centre():
    assert random_resized_crop(1000, 10, key=(0, 0, 0), flip=False) == (493, 0, 13, 10, False)
    assert random_resized_crop(10, 1000, key=(0, 0, 0), flip=False) == (0, 493, 10, 13, False)


def test_crops_depend_on_the_seed_the_epoch_and_the_index():
    keys = (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)
    for crop in ("random-resized", "crop"):
        found = {View(90, 120, crop, seed=key[0]).choose(500, 400, *key[1:]) for key in keys}
        assert len(found) == 4
    one, other = (random_resized_crop(500, 400, key=(5, 6, 7), flip=f) for f in (True, False))
    assert one._replace(flip=False) == other


def test_random_crops_are_uniform_and_the_centre_crop_is_in_the_centre():
    crops = [random_crop(500, 375, share=0.875, key=(0, 0, i), flip=False) for i in range(5000)]
    assert {(crop.width, crop.height) for crop in crops} == {(328, 328)}
    for places, most in (([c.left for c in crops], 172), ([c.top for c in crops], 47)):
        assert min(places) == 0
        assert max(places) == most
        assert abs(np.mean(places) - most / 2) < most / 40
    assert centre_crop(500, 375, share=0.875) == (86, 23, 328, 328, False)
    assert centre_crop(100, 200, share=1) == (0, 50, 100, 100, False)
