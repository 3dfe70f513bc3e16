"""When gradients make an update: the rule by hand, and its properties for workers of any speed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineprune.distributed.parameter_servers.update_rule import UpdateRule
from fineprune.distributed.simulated_workers import Gradient, simulated_updates

DURATIONS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20)
GRADIENTS = st.lists(st.builds(Gradient, st.integers(0, 9), st.integers(3, 5)), max_size=10)
FREE = UpdateRule()


def script(durations):
    return lambda worker, step: durations[(7 * worker + step) % len(durations)]


def updates(rule, workers, duration, number):
    return list(itertools.islice(simulated_updates(rule, workers, duration), number))


def test_asynchronous_gradients_are_taken_one_by_one_in_the_order_of_arrival():
    waiting = [Gradient(1, 3), Gradient(0, 0)]
    assert FREE.next_update(waiting, [], 9, 5) == [Gradient(1, 3)]
    assert FREE.next_update([], [Gradient(1, 3)], 9, 5) == []
    assert FREE.may_start(10**6)


def test_a_bound_holds_a_gradient_back_until_an_older_one_has_come():
    rule = UpdateRule(bound=1)
    assert (rule.may_start(1), rule.may_start(2)) == (True, False)
    assert rule.next_update([Gradient(0, 3)], [Gradient(1, 2)], 3, 9) == []
    assert rule.next_update([Gradient(0, 3)], [Gradient(1, 3)], 3, 9) == [Gradient(0, 3)]
    both = [Gradient(0, 3), Gradient(1, 2)]
    assert rule.next_update(both, [], 3, 9) == [Gradient(1, 2)]
    # Two others that read the same version cannot both be at most one update behind.
    others = [Gradient(1, 3), Gradient(2, 3)]
    assert rule.next_update([Gradient(0, 3)], others, 3, 9) == []
    assert UpdateRule(bound=2).next_update([Gradient(0, 3)], others, 3, 9) == [Gradient(0, 3)]


def test_a_quorum_takes_the_first_gradients_of_the_current_version():
    rule = UpdateRule(quorum=2)
    late, fresh = Gradient(0, 4), [Gradient(worker, 5) for worker in (3, 1, 2)]
    assert rule.next_update([late, *fresh[:1]], [], 5, 9) == []
    assert rule.next_update([late, *fresh], [], 5, 9) == fresh[:2]
    assert rule.next_update(fresh[:1], [], 5, remaining=1) == fresh[:1]
    assert rule.next_update(fresh, [], 5, remaining=0) == []


@given(waiting=GRADIENTS, quorum=st.integers(1, 10), remaining=st.integers(0, 10))
def test_a_quorum_takes_so_many_fresh_gradients_or_none(waiting, quorum, remaining):
    taken = UpdateRule(quorum=quorum).next_update(waiting, [], 5, remaining)
    fresh = [gradient for gradient in waiting if gradient.version == 5]
    number = min(quorum, remaining)
    assert taken == (fresh[:number] if len(fresh) >= number else [])


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_equal_workers_are_one_less_behind_than_they_are(workers):
    found = updates(FREE, workers, lambda worker, step: 1.0, 12)
    assert [update.staleness for update in found] == [min(i, workers - 1) for i in range(12)]
    assert [update.worker for update in found] == [i % workers for i in range(12)]


def test_a_slow_worker_by_hand():
    """The fast one ends at 1, 2, 3 and so on, the slow one at 2.5 and 5."""
    found = updates(FREE, 2, lambda worker, step: (1.0, 2.5)[worker], 6)
    seen = [(update.worker, update.staleness) for update in found]
    assert seen == [(0, 0), (0, 0), (1, 2), (0, 1), (0, 0), (0, 0)]
    assert [update.readers for update in found[:4]] == [(0,), (0,), (1,), (0,)]


@given(durations=DURATIONS, workers=st.integers(1, 5), number=st.integers(0, 20))
def test_asynchronous_updates_follow_one_another(durations, workers, number):
    found = updates(FREE, workers, script(durations), number)
    assert [update.version for update in found] == list(range(1, number + 1))


@given(
    durations=DURATIONS,
    workers=st.integers(1, 5),
    number=st.integers(0, 20),
    bound=st.integers(0, 9),
)
def test_a_bound_holds_and_nobody_waits_for_ever(durations, workers, number, bound):
    found = updates(UpdateRule(bound=bound), workers, script(durations), number)
    assert len(found) == number
    assert all(update.staleness <= bound for update in found)
    if bound >= number + workers:
        assert found == updates(FREE, workers, script(durations), number)
