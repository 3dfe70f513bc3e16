import numpy as np
import pytest
import torch

from fineprune.datasets.augment import Augment, draw
from fineprune.datasets.image_set import ImageSet
from fineprune.training.data import EpochLoader
from fineprune.training.data.memory import MemorySource

MEAN, STD = (0.49, 0.4, 0.3), (0.2, 0.25, 0.35)
CROP_AND_FLIP = Augment(padding=4, flip=True)


class FixedSampler:
    def __init__(self, order, epoch=0):
        self.indices = torch.as_tensor(order, dtype=torch.int64)
        self.epoch = epoch

    def __len__(self):
        return len(self.indices)

    def order(self):
        return self.indices


def some_set(count=23, channels=3, height=6, width=5):
    generator = torch.Generator().manual_seed(1)
    shape = (count, channels, height, width)
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return ImageSet(images, torch.arange(count) % 7, tuple("abcdefg"))


def source(data, augment, seed, mean=MEAN, std=STD):
    return MemorySource(
        place="a set",
        device="cpu",
        classes=data.classes,
        index=np.arange(len(data)),
        labels=data.labels.numpy(),
        images=data,
        augment=augment,
        seed=seed,
        statistics=(mean, std),
    )


def make(
    data, sampler, batch_size=4, augment=CROP_AND_FLIP, seed=3, drop_last=False, mean=MEAN, std=STD
):
    return EpochLoader(
        source(data, augment, seed, mean, std), sampler, batch_size, drop_last=drop_last
    )


def evaluation(data):
    return EpochLoader(source(data, Augment(), 0))


def one_epoch(loader):
    batches = list(loader)
    index = torch.cat([index for index, _ in batches])
    x = torch.cat([x for _, (x, _) in batches])
    y = torch.cat([y for _, (_, y) in batches])
    return index, x, y


def normalised(pixels, mean=MEAN, std=STD):
    """(v / 255 - mean) / std in float64; pixels of shape (N, C, H, W)."""
    shape = (1, len(mean), 1, 1)
    scaled = pixels.astype(np.float64) / 255
    return (scaled - np.reshape(mean, shape)) / np.reshape(std, shape)


def slow_augment(data, index, augment, seed, epoch):
    """One image after another, with numpy's padding and slicing."""
    draws = draw(augment, seed=seed, epoch=epoch, samples=len(data))
    _, _, height, width = data.images.shape
    around = ((0, 0), (augment.padding, augment.padding), (augment.padding, augment.padding))
    result = []
    for i in index:
        padded = np.pad(data.images[i].numpy(), around)
        top, left = int(draws.top[i]), int(draws.left[i])
        window = padded[:, top : top + height, left : left + width]
        result.append(window[:, :, ::-1] if draws.flip[i] else window)
    return np.stack(result)


@pytest.mark.parametrize("shape", [(3, 6, 5), (1, 4, 4), (3, 32, 32), (4, 3, 7)])
@pytest.mark.parametrize(
    "augment",
    [CROP_AND_FLIP, Augment(padding=127), Augment(padding=1, flip=True), Augment(flip=True)],
)
def test_batches_equal_a_slow_reference(augment, shape):
    data = some_set(23, *shape)
    order = [5, 22, 0, 5, 13, 1, 7, 22, 21, 2]
    mean, std = (0.5,) * shape[0], tuple(0.1 * (1 + c) for c in range(shape[0]))
    loader = make(data, FixedSampler(order, 2), augment=augment, mean=mean, std=std)
    index, x, y = one_epoch(loader)
    expected = normalised(slow_augment(data, order, augment, seed=3, epoch=2), mean, std)
    np.testing.assert_allclose(x.numpy(), expected, rtol=0, atol=1e-5)
    assert index.tolist() == order
    assert torch.equal(y, data.labels[index])
    index, (x, y) = next(iter(loader))
    assert (index.dtype, x.dtype, y.dtype) == (torch.int64, torch.float32, torch.int64)
    assert (index.shape, x.shape, y.shape) == ((4,), (4, *shape), (4,))
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_the_reference_sees_windows_on_all_sides_and_both_directions():
    draws = draw(CROP_AND_FLIP, seed=3, epoch=2, samples=2000)
    assert set(draws.top) == set(draws.left) == set(range(9))
    assert 900 < draws.flip.sum() < 1100
    assert (draws.top != draws.left).any()
    assert draws.top.dtype == draws.left.dtype == np.uint8
    assert draws.flip.dtype == np.bool_


@pytest.mark.parametrize("batch_size", [1, 3, 8, 23, 100])
def test_a_sample_is_bit_equal_in_any_batch_and_order(batch_size):
    data = some_set()
    _, expected, _ = one_epoch(make(data, FixedSampler(range(23)), batch_size=5))
    shuffled = torch.randperm(23, generator=torch.Generator().manual_seed(batch_size))
    # An epoch that skips samples changes nothing for the others.
    kept = shuffled[: 23 - batch_size % 4]
    index, x, y = one_epoch(make(data, FixedSampler(kept), batch_size=batch_size))
    assert torch.equal(index, kept)
    assert torch.equal(x, expected[kept])
    assert torch.equal(y, data.labels[kept])


def test_draws_change_with_seed_and_epoch_and_repeat_otherwise():
    data = some_set(200)
    sampler = FixedSampler(range(200))
    loader = make(data, sampler)
    _, first, _ = one_epoch(loader)
    _, again, _ = one_epoch(loader)
    sampler.epoch = 1
    _, later, _ = one_epoch(loader)
    _, other, _ = one_epoch(make(data, FixedSampler(range(200)), seed=4))
    assert torch.equal(first, again)
    for different in (later, other):
        share = (first == different).flatten(1).all(1).float().mean()
        assert share < 0.1


def test_windows_are_the_same_with_and_without_flipping():
    flipped = draw(CROP_AND_FLIP, seed=0, epoch=7, samples=50)
    plain = draw(Augment(padding=4), seed=0, epoch=7, samples=50)
    assert (flipped.top == plain.top).all()
    assert (flipped.left == plain.left).all()
    assert not plain.flip.any()


@pytest.mark.parametrize(
    ("samples", "drop_last", "sizes"),
    [(10, False, [4, 4, 2]), (10, True, [4, 4]), (8, True, [4, 4]), (3, True, []), (0, False, [])],
)
def test_number_and_sizes_of_batches(samples, drop_last, sizes):
    loader = make(some_set(), FixedSampler(range(samples)), drop_last=drop_last)
    assert [len(index) for index, _ in loader] == sizes
    assert len(loader) == len(sizes)


def test_batches_may_be_changed_and_no_global_random_state_is():
    data = some_set()
    before = torch.get_rng_state()
    keys = np.random.get_state(legacy=False)["state"]["key"].copy()  # noqa: NPY002
    loader = make(data, FixedSampler(range(23)))
    _, expected, _ = one_epoch(loader)
    for _, (x, y) in loader:
        x.zero_()
        y.zero_()
    _, again, labels = one_epoch(loader)
    assert torch.equal(again, expected)
    assert torch.equal(labels, data.labels)
    assert torch.equal(before, torch.get_rng_state())
    assert (keys == np.random.get_state(legacy=False)["state"]["key"]).all()  # noqa: NPY002


def test_evaluation_goes_through_everything_in_order_again_and_again():
    data = some_set(1023)
    batches = evaluation(data)
    for _ in range(2):
        parts = [batch for _, batch in batches]
        assert [len(x) for x, _ in parts] == [500, 500, 23]
        x = torch.cat([x for x, _ in parts])
        y = torch.cat([y for _, y in parts])
        np.testing.assert_allclose(x.numpy(), normalised(data.images.numpy()), rtol=0, atol=2e-6)
        assert torch.equal(y, data.labels)
    first, _ = parts[0]
    assert first.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("std", [(0.2, 0.0, 0.2), (0.2, 0.2), (0.2, float("nan"), 0.2)])
def test_a_wrong_deviation_is_refused_at_the_start(std):
    with pytest.raises(ValueError, match="expected a mean and a positive std") as error:
        make(some_set(), FixedSampler(range(3)), std=std)
    assert "\n" not in str(error.value)
