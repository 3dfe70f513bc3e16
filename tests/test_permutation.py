"""The order without an array: every number once, uniformly, and computed from any position."""

import numpy as np
import pytest

from fineprune.pruning.permutation import Permutation
from fineprune.pruning.random_streams import stream


def permuted(length, seed=0, **options):
    """Return a whole order."""
    order = Permutation(length, np.random.default_rng(seed), **options)
    return order.at(np.arange(length))


def excess(observed):
    """Return by how many standard deviations chi-square exceeds that of equal probabilities."""
    expected = observed.sum() / len(observed)
    freedom = len(observed) - 1
    return (((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def test_every_length_gives_every_number_once():
    for length in (*range(1, 2001), 4095, 4096, 4097, 99_999, 2**20 + 7):
        values = permuted(length, seed=length)
        assert values.dtype == np.int64
        assert np.array_equal(np.sort(values), np.arange(length)), length


def test_numbers_are_the_same_from_any_position_on():
    order = Permutation(100_003, np.random.default_rng(1))
    whole = order.at(np.arange(order.length))
    for begin in (0, 1, 4096, 77_777, 100_002):
        assert np.array_equal(order.at(np.arange(begin, order.length)), whole[begin:])
    assert order.at(np.array([5, 3, 5])).tolist() == whole[[5, 3, 5]].tolist()


def test_a_billion_numbers_need_no_array_of_them():
    order = Permutation(10**9, np.random.default_rng(1))
    assert order._tables.nbytes < 3e6
    values = order.at(np.arange(10**9 - 100_000, 10**9))
    assert len(np.unique(values)) == 100_000
    assert values.min() >= 0
    assert values.max() < 10**9
    assert abs(excess(np.bincount(values // 10**7, minlength=100))) < 5


def test_each_seed_and_each_epoch_has_an_order_of_its_own():
    orders = [
        tuple(Permutation(1000, stream(seed, epoch, "order")).at(np.arange(1000)).tolist())
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == 9
    # Two orders agree in one place on average.
    pairs = [(a, b) for a in orders for b in orders if a < b]
    agreements = [np.count_nonzero(np.equal(a, b)) for a, b in pairs]
    assert np.mean(agreements) < 3


def distances(length, rounds, orders=600):
    """Return how far from uniform the first number and the differences at some distances are."""
    side = int(np.ceil(length**0.5))
    first = np.zeros(length)
    differences = {distance: np.zeros(length) for distance in (1, side - 1, side, side + 1)}
    for seed in range(orders):
        options = {} if rounds is None else {"rounds": rounds}
        values = permuted(length, seed, **options)
        first[values[0]] += 1
        for distance, observed in differences.items():
            between = (values[distance:] - values[:-distance]) % length
            observed += np.bincount(between, minlength=length)
    return [excess(first), *(excess(observed[1:]) for observed in differences.values())]


def test_first_numbers_and_differences_of_neighbours_are_uniform():
    assert max(map(abs, distances(400, None))) < 5


@pytest.mark.parametrize("rounds", [3, 4])
def test_the_same_statistics_notice_too_few_rounds(rounds):
    assert max(distances(400, rounds)) > 50


def test_short_orders_all_have_the_same_probability():
    rng = np.random.default_rng(0)
    counted: dict[tuple[int, ...], int] = {}
    for _ in range(2400):
        order = tuple(Permutation(4, rng).at(np.arange(4)).tolist())
        counted[order] = counted.get(order, 0) + 1
    assert len(counted) == 24
    assert abs(excess(np.array(list(counted.values())))) < 5
