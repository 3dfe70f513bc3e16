import hashlib

import numpy as np
import pytest
import torch

from fineprune.datasets.digits import load_digits
from fineprune.datasets.image_set import ImageSet, channel_statistics


def some_images(count: int, channels: int = 3, height: int = 5, width: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    shape = (count, channels, height, width)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def some_set(count: int) -> ImageSet:
    return ImageSet(some_images(count), torch.arange(count) % 3, ("a", "b", "c"))


def test_image_set_knows_its_length_and_takes_subsets_in_the_given_order():
    data = some_set(7)
    part = data.subset(torch.tensor([5, 0, 5]))
    assert len(data) == 7
    assert len(part) == 3
    assert torch.equal(part.images, torch.stack([data.images[5], data.images[0], data.images[5]]))
    assert part.labels.tolist() == [2, 0, 2]
    assert part.classes == data.classes
    part.images.zero_()
    assert torch.equal(data.images, some_images(7))


@pytest.mark.parametrize("count", [1, 3, 1024, 1025])
def test_channel_statistics_equal_numpy_over_all_pixels(count):
    images = some_images(count)
    scaled = images.numpy().astype(np.float64) / 255
    mean, std = channel_statistics(images)
    assert mean == pytest.approx(scaled.mean(axis=(0, 2, 3)), abs=1e-12)
    assert std == pytest.approx(scaled.std(axis=(0, 2, 3)), abs=1e-12)


def test_digits_are_the_originals_pixel_for_pixel():
    datasets = pytest.importorskip("sklearn.datasets")
    source = datasets.load_digits()
    originals: dict[bytes, list[int]] = {}
    for image, label in zip(source.images, source.target, strict=True):
        scaled = np.rint(image / 16 * 255).astype(np.uint8)
        originals.setdefault(scaled.tobytes(), []).append(int(label))
    found = []
    for part in load_digits(train_size=1000):
        for image, label in zip(part.images.numpy(), part.labels.tolist(), strict=True):
            small = image[0, ::4, ::4]
            assert (image == np.kron(small, np.ones((4, 4), dtype=np.uint8))).all()
            key = np.ascontiguousarray(small).tobytes()
            assert label in originals[key]
            found.append(key)
    # Together the parts are all the images, each as often as in the source: nothing is in both.
    expected = [key for key, labels in originals.items() for _ in labels]
    assert sorted(found) == sorted(expected)
    assert load_digits()[0].classes == tuple("0123456789")


def test_digits_split_is_fixed_and_a_smaller_training_set_is_part_of_a_larger():
    train, test = load_digits(train_size=1024)
    smaller, rest = load_digits(train_size=100)
    assert torch.equal(smaller.images, train.images[:100])
    assert torch.equal(rest.labels[924:], test.labels)
    digest = hashlib.sha256(train.labels.numpy().astype("<i8").tobytes()).hexdigest()
    assert digest == "365934147ebed5373c554b6311fb0e61972d091c1cb317e51566d4004f200796"
