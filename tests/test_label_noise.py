"""Label noise: exactly the given share is wrong, and only the noise's own seed decides which."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fineprune.datasets.image_set import class_number
from fineprune.datasets.label_noise import class_map, mapped_noise, symmetric_noise
from fineprune.errors import InputError

ANIMALS = ("bird", "cat", "dog", "frog")


def some_labels(number, classes, seed=0):
    return np.random.default_rng(seed).integers(0, classes, number)


@given(
    number=st.integers(0, 300),
    classes=st.integers(2, 12),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**70),
)
def test_exactly_the_share_is_replaced_by_other_classes(number, classes, share, seed):
    labels = some_labels(number, classes)
    before = labels.copy()
    noisy = symmetric_noise(labels, classes, share, seed)
    assert np.array_equal(labels, before)
    assert noisy.dtype == np.int64
    assert ((noisy >= 0) & (noisy < classes)).all()
    assert (noisy != labels).sum() == round(share * number)


@given(
    sizes=st.lists(st.integers(0, 60), min_size=4, max_size=4),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**40),
)
def test_a_map_replaces_exactly_the_share_of_each_mapped_class(sizes, share, seed):
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(4), sizes))
    noisy = mapped_noise(labels, {0: 1, 1: 2}, share, seed)
    for source, target in ((0, 1), (1, 2)):
        replaced = (labels == source) & (noisy != labels)
        assert replaced.sum() == round(share * sizes[source])
        assert (noisy[replaced] == target).all()
    assert np.array_equal(noisy[labels > 1], labels[labels > 1])


def test_the_seed_alone_decides():
    labels = some_labels(1000, 10)
    first = symmetric_noise(labels, 10, 0.3, seed=0)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert np.array_equal(first, symmetric_noise(labels, 10, 0.3, seed=0))
    other = symmetric_noise(labels, 10, 0.3, seed=1)
    both = ((first != labels) & (other != labels)).sum()
    # 90 are expected of two independent choices; the standard deviation is 8.
    assert 50 < both < 130


def test_the_wrong_labels_of_a_smaller_share_are_among_those_of_a_larger_one():
    labels = some_labels(1000, 10)
    less, more = (symmetric_noise(labels, 10, share, seed=3) for share in (0.1, 0.4))
    assert np.array_equal(less[less != labels], more[less != labels])
    mapping = {3: 5, 4: 0}
    less, more = (mapped_noise(labels, mapping, share, seed=3) for share in (0.1, 0.4))
    assert np.array_equal(less[less != labels], more[less != labels])


def test_every_other_class_replaces_a_label_equally_often():
    noisy = symmetric_noise(np.full(30_000, 2), 4, 1.0, seed=0)
    counts = np.bincount(noisy, minlength=4)
    assert counts[2] == 0
    assert np.abs(counts[[0, 1, 3]] - 10_000).max() < 400  # Five standard deviations.


def test_a_map_names_classes_by_name_or_number():
    assert class_map(["cat->dog", "3 -> 0"], ANIMALS) == {1: 2, 3: 0}
    assert class_number("here", "1", ("1", "0")) == 0  # A name counts first.


def test_a_name_that_has_lost_its_zeros_is_refused():
    assert class_number("here", "1", ("00", "01")) == 1  # The number of the same class.
    with pytest.raises(InputError, match=r"got 1, which is the name 01 without .* class 02: wr"):
        class_number("here", "1", ("01", "02"))


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["cat"], "such as 'cat->dog' or '3->5', got 'cat'"),
        (["cat->dog->frog"], "got 'cat->dog->frog'"),
        (["kat->dog"], "got 'kat': did you mean 'cat'?"),
        (["4->0"], "name or number (0..3) of a class in data.label_noise_map, got '4'"),
        (["cat->1"], "by another one, got 'cat->1'"),
        (["cat->dog", "1->frog"], "each class once, got '1' twice"),
    ],
)
def test_a_wrong_map_is_one_line(pairs, said):
    with pytest.raises(InputError) as raised:
        class_map(pairs, ANIMALS)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_one_class_has_no_other():
    labels = np.zeros(5, dtype=np.int64)
    with pytest.raises(InputError, match="expected at least two classes with label noise, got 1"):
        symmetric_noise(labels, 1, 0.5, seed=0)
    assert np.array_equal(symmetric_noise(labels, 1, 0.0, seed=0), labels)
