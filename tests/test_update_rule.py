"""When gradients make an update: the rule by hand, and its properties for workers of any speed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineprune.distributed.parameter_servers.update_rule import (
    Gradient,
    UpdateRule,
    simulated_updates,
)
from fineprune.errors import InputError

DURATIONS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=20)
FREE = UpdateRule()


def script(durations):
    return lambda worker, step: durations[(7 * worker + step) % len(durations)]


def updates(rule, workers, duration, batches):
    return list(simulated_updates(rule, workers, duration, batches))


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


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_equal_workers_are_one_less_behind_than_they_are(workers):
    found = updates(FREE, workers, lambda worker, step: 1.0, 12)
    assert [update.staleness for update in found] == [min(i, workers - 1) for i in range(12)]
    assert [update.workers for update in found] == [(i % workers,) for i in range(12)]


def test_a_slow_worker_by_hand():
    found = updates(FREE, 2, lambda worker, step: (1.0, 2.5)[worker], 6)
    seen = [(update.workers[0], update.staleness, update.time) for update in found]
    assert seen == [(0, 0, 1), (0, 0, 2), (1, 2, 2.5), (0, 1, 3), (0, 0, 4), (1, 2, 5)]
    assert [update.readers for update in found] == [(0,), (0,), (1,), (0,), (), ()]


@given(durations=DURATIONS, workers=st.integers(1, 5), batches=st.integers(0, 20))
def test_asynchronous_updates_are_one_a_batch(durations, workers, batches):
    found = updates(FREE, workers, script(durations), batches)
    assert [update.version for update in found] == list(range(1, batches + 1))
    assert all(a.time <= b.time for a, b in itertools.pairwise(found))


@given(
    durations=DURATIONS,
    workers=st.integers(1, 5),
    batches=st.integers(0, 20),
    bound=st.integers(0, 4),
)
def test_a_bound_holds_and_nobody_waits_for_ever(durations, workers, batches, bound):
    found = updates(UpdateRule(bound=bound), workers, script(durations), batches)
    assert len(found) == batches
    assert all(update.staleness <= bound for update in found)
    if bound >= batches:
        assert found == updates(FREE, workers, script(durations), batches)


@given(durations=DURATIONS, workers=st.integers(1, 5), batches=st.integers(0, 20), data=st.data())
def test_a_quorum_takes_fresh_gradients_only(durations, workers, batches, data):
    quorum = data.draw(st.integers(1, workers))
    found = updates(UpdateRule(quorum=quorum), workers, script(durations), batches)
    assert all(update.staleness == 0 for update in found)
    sizes = [len(update.workers) for update in found]
    assert sizes == [quorum] * (batches // quorum) + [batches % quorum] * (batches % quorum > 0)


def test_a_backup_worker_makes_up_for_a_slow_one():
    def duration(worker, step):
        return 100.0 if worker == 2 else 1.0

    assert updates(UpdateRule(quorum=2), 3, duration, 10)[-1].time == 5
    assert updates(UpdateRule(quorum=3), 3, duration, 9)[-1].time == 300


def test_updates_without_an_end_go_on():
    found = simulated_updates(FREE, 2, lambda worker, step: 1.0)
    assert [update.version for update in itertools.islice(found, 100)] == list(range(1, 101))


@pytest.mark.parametrize(
    ("rule", "workers"), [(FREE, 0), (UpdateRule(quorum=3), 2), (UpdateRule(bound=-1), 2)]
)
def test_too_few_workers_are_refused_in_one_line(rule, workers):
    with pytest.raises(InputError, match="expected") as raised:
        next(simulated_updates(rule, workers, lambda worker, step: 1.0))
    assert "\n" not in str(raised.value)
