"""The ledger of an epoch's batches: each is applied exactly once, or is reported as lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_updates import updates_of

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey, BatchLedger


@given(batches=st.integers(0, 12), data=st.data())
def test_whatever_happens_each_batch_ends_applied_once_or_lost(batches, data):
    ledger = BatchLedger(2, batches)
    leased: list[BatchKey] = []
    for _ in range(40):
        event = data.draw(st.sampled_from(["lease", "stage", "apply", "reject", "die", "undo"]))
        worker = data.draw(st.integers(0, 3))
        waiting = [key for key in leased if key not in ledger.staged]
        if event == "lease" and (key := ledger.lease(worker)) is not None:
            leased.append(key)
        elif event == "stage" and waiting:
            ledger.stage(waiting[0])
        elif event == "apply":
            taken = ledger.staged[:2]
            ledger.apply(taken)
            leased = [key for key in leased if key not in taken]
        elif event == "reject" and leased:
            ledger.reject(leased.pop())
        elif event == "die":
            gone = ledger.orphan(worker)
            leased = [key for key in leased if key not in gone]
        elif event == "undo":
            ledger.undo(ledger.applied[-2:], lose=data.draw(st.booleans()))
        unfinished = len(ledger._queue) + len(ledger._announced) + len(leased)
        assert len(ledger.applied) + len(ledger.lost) + unfinished == batches
        assert ledger.remaining == unfinished
    for key in leased:
        if key not in ledger.staged:
            ledger.stage(key)
    ledger.apply(ledger.staged)
    while (key := ledger.lease(0)) is not None:
        ledger.stage(key)
        ledger.apply([key])
    assert ledger.remaining == 0
    assert sorted(ledger.applied + ledger.lost) == [BatchKey(2, batch) for batch in range(batches)]


def test_the_lowest_queued_batch_is_leased_first():
    ledger = BatchLedger(0, 3)
    first, second = ledger.lease(0), ledger.lease(1)
    assert (first, second) == (BatchKey(0, 0), BatchKey(0, 1))
    assert ledger.orphan(0) == [first]
    assert [ledger.lease(1), ledger.lease(1), ledger.lease(1)] == [first, BatchKey(0, 2), None]


def test_staged_batches_keep_the_order_of_their_arrival():
    ledger = BatchLedger(0, 2)
    keys = [ledger.lease(0), ledger.lease(1)]
    for key in reversed(keys):
        assert key is not None
        ledger.stage(key)
    assert ledger.staged == keys[::-1]


def test_what_is_out_of_order_is_refused():
    ledger = BatchLedger(0, 2)
    key = BatchKey(0, 0)
    for wrong in (ledger.stage, ledger.reject, lambda key: ledger.apply([key])):
        with pytest.raises(ValueError, match="batch 0 of epoch 0"):
            wrong(key)
    ledger.lease(0)
    ledger.stage(key)
    with pytest.raises(ValueError, match="leased"):
        ledger.stage(key)
    with pytest.raises(ValueError, match="applied"):
        ledger.undo([key], lose=True)
    ledger.apply([key])
    with pytest.raises(ValueError, match="staged"):
        ledger.apply([key])


@given(
    batches=st.integers(0, 12),
    quorum=st.integers(1, 3),
    synchronous=st.booleans(),
    data=st.data(),
)
def test_a_stopped_epoch_is_a_prefix_of_whole_updates(batches, quorum, synchronous, data):
    """Workers die, updates are undone and gradients arrive too late, before and after the stop."""
    quorum = quorum if synchronous else 1
    first = data.draw(st.integers(0, batches // quorum)) * quorum
    ledger = BatchLedger(0, batches, first)
    holders: dict[int, BatchKey] = {}
    stopped, steps = False, 0
    while ledger.remaining:
        steps += 1
        accidents = steps <= 60
        events = ["lease", "stage", "apply", *(["die", "undo", "stop"] if accidents else [])]
        event = data.draw(st.sampled_from(events)) if accidents else events[steps % 3]
        if event == "lease":
            # Each third step is a lease, so the workers take turns from lease to lease.
            turn = steps // 3 % (quorum + 1)
            worker = data.draw(st.integers(0, quorum)) if accidents else turn
            if worker not in holders and (key := ledger.lease(worker)) is not None:
                holders[worker] = key
        elif event == "stage":
            for key in [key for key in holders.values() if key not in ledger.staged][:1]:
                ledger.stage(key)
        elif event == "apply":
            taken = ledger.staged[: min(quorum, ledger.remaining)]
            if len(taken) == min(quorum, ledger.remaining):
                ledger.apply(taken)
                late = [key for key in holders.values() if key not in taken] if synchronous else []
                for key in late:
                    ledger.reject(key)
                gone = [*taken, *late]
                holders = {one: key for one, key in holders.items() if key not in gone}
        elif event == "die" and holders:
            worker = data.draw(st.sampled_from(sorted(holders)))
            ledger.orphan(worker)
            del holders[worker]
        elif event == "undo":
            updates = data.draw(st.integers(0, len(ledger.applied) // quorum))
            ledger.undo(ledger.applied[updates * quorum :], lose=False)
        stopped = stopped or event == "stop"
        if stopped:
            put_back = ledger.stop(quorum)
            holders = {one: key for one, key in holders.items() if key not in put_back}
    assert [key.batch for key in sorted(ledger.applied)] == list(range(first, ledger.end))
    assert ledger.done == ledger.end
    assert ledger.end == batches or (stopped and (ledger.end - first) % quorum == 0)


def test_a_stop_finishes_what_makes_a_whole_update_and_puts_the_rest_back():
    ledger = BatchLedger(0, 10)
    keys = [ledger.lease(worker) for worker in range(5)]
    assert ledger.stop(2) == keys[4:]
    assert ledger.end == 4
    assert ledger.lease(4) is None
    ledger.orphan(1)
    assert ledger.stop(2) == [keys[0], keys[2], keys[3]]
    assert ledger.remaining == 0


@pytest.mark.parametrize(("batches", "quorum", "updates"), [(391, 3, 131), (6, 3, 2), (0, 3, 0)])
def test_updates_of_an_epoch(batches, quorum, updates):
    assert updates_of(batches, quorum) == updates
