"""The staleness of gradients, in a simulation of workers with given step durations."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_updates import simulate, updates_of

from fineprune.distributed.parameter_servers.staleness import may_apply, may_start

DELAYS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20)


def script(delays):
    return lambda worker, step: delays[(7 * worker + step) % len(delays)]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_equal_workers_are_one_less_behind_than_they_are(workers):
    pushes = simulate(lambda worker, step: 1.0, workers, 12)
    assert [push.staleness for push in pushes] == [min(i, workers - 1) for i in range(12)]
    assert [push.worker for push in pushes] == [i % workers for i in range(12)]


def test_a_slow_worker_by_hand():
    pushes = simulate(lambda worker, step: (1.0, 2.5)[worker], 2, 6)
    seen = [(push.worker, push.staleness, push.time) for push in pushes]
    assert seen == [(0, 0, 1), (0, 0, 2), (1, 2, 2.5), (0, 1, 3), (0, 0, 4), (1, 2, 5)]


@given(delays=DELAYS, workers=st.integers(1, 5), batches=st.integers(0, 20))
def test_asynchronous_updates_are_one_a_batch(delays, workers, batches):
    pushes = simulate(script(delays), workers, batches)
    assert [push.version for push in pushes] == list(range(1, batches + 1))
    assert all(a.time <= b.time for a, b in itertools.pairwise(pushes))


@given(
    delays=DELAYS, workers=st.integers(1, 5), batches=st.integers(0, 20), bound=st.integers(0, 4)
)
def test_a_bound_holds_and_nobody_waits_for_ever(delays, workers, batches, bound):
    pushes = simulate(script(delays), workers, batches, bound=bound)
    assert len(pushes) == batches
    assert all(push.staleness <= bound for push in pushes)
    if bound >= batches:
        assert pushes == simulate(script(delays), workers, batches)


@given(delays=DELAYS, workers=st.integers(1, 5), batches=st.integers(0, 20), data=st.data())
def test_a_quorum_takes_fresh_gradients_only(delays, workers, batches, data):
    quorum = data.draw(st.integers(1, workers))
    pushes = simulate(script(delays), workers, batches, quorum=quorum)
    assert len(pushes) == batches
    assert all(push.staleness == 0 for push in pushes)
    sizes = Counter(push.version for push in pushes)
    assert len(sizes) == updates_of(batches, quorum)
    assert all(size == quorum for version, size in sizes.items() if version < len(sizes))


def test_a_backup_worker_makes_up_for_a_slow_one():
    def delay(worker, step):
        return 100.0 if worker == 2 else 1.0

    assert simulate(delay, 3, 10, quorum=2)[-1].time == 5
    assert simulate(delay, 3, 9, quorum=3)[-1].time == 300


def test_the_rules_of_a_bound():
    assert may_start(5, None)
    assert may_start(1, 1)
    assert not may_start(2, 1)
    assert may_apply(9, [0, 0], None)
    assert may_apply(3, [3, 3], 2)
    assert not may_apply(3, [3, 3], 1)
    assert not may_apply(3, [2], 1)


@pytest.mark.parametrize(
    "settings",
    [{"workers": 0}, {"batches": -1}, {"quorum": 3}, {"bound": -1}, {"quorum": 1, "bound": 1}],
)
def test_wrong_settings_are_refused_in_one_line(settings):
    with pytest.raises(ValueError, match="expected") as raised:
        simulate(lambda worker, step: 1.0, **{"workers": 2, "batches": 3, **settings})
    assert "\n" not in str(raised.value)
