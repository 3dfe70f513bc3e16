"""The state of an epoch: every transition, and what is known after it."""

import pytest
import torch

from fineprune.pruning.epoch_cycle import EpochCycle, Phase, Progress
from fineprune.pruning.plan import EpochPlan


def plan(epoch):
    return EpochPlan(epoch, torch.arange(4))


def made(epoch=0):
    cycle: EpochCycle = EpochCycle()
    cycle.count = lambda batches: None
    cycle.follow(plan(epoch), 4)
    return cycle


def restored(epoch=3):
    cycle = made()
    cycle.restore(Progress(plan(epoch), 4, batches=1, samples=2, restored=True), Phase.RESTORED)
    return cycle


def test_a_new_epoch_is_planned_and_nothing_is_unfinished():
    cycle = made(2)
    assert (cycle.epoch, cycle.phase, cycle.is_open) == (2, Phase.PLANNED, True)
    assert cycle.unfinished is None
    assert cycle.next_epoch == 2
    assert not cycle.driven
    assert not cycle.named
    assert not cycle.ended_here
    assert not cycle.sampler_read
    assert not cycle.plan_read
    assert cycle.limit == 1


def test_an_epoch_with_records_is_unfinished_until_it_ends():
    cycle = made(2)
    cycle.begin(4)
    assert cycle.phase is Phase.RECORDING
    assert cycle.room() == 4
    cycle.add(3)
    assert (cycle.current.samples, cycle.current.batches, cycle.room()) == (3, 1, 1)
    assert cycle.unfinished is cycle.current
    assert cycle.next_epoch == 2
    cycle.limit = 9
    cycle.end(cycle.current)
    assert (cycle.phase, cycle.is_open, cycle.limit) == (Phase.ENDED, False, 1)
    assert cycle.unfinished is None
    assert cycle.next_epoch == 3
    assert cycle.ended_here


@pytest.mark.parametrize(
    ("epoch", "must_end"), [(0, False), (2, False), (3, False), (4, True), (9, True)]
)
def test_a_restored_epoch_ends_only_if_the_user_goes_beyond_it(epoch, must_end):
    assert restored(3).must_end_before(epoch) is must_end


@pytest.mark.parametrize(("epoch", "must_end"), [(2, True), (3, False), (4, True)])
def test_an_epoch_that_this_process_recorded_ends_before_any_other(epoch, must_end):
    cycle = restored(3)
    cycle.begin(4)
    assert cycle.must_end_before(epoch) is must_end


def test_nothing_must_end_before_another_epoch_if_nothing_was_recorded():
    assert not made(1).must_end_before(2)


def test_a_restored_epoch_is_set_aside_and_taken_up_again():
    cycle = restored(3)
    kept = cycle.current
    for epoch in (0, 1):
        cycle.follow(plan(epoch), 4)
        assert (cycle.epoch, cycle.phase) == (epoch, Phase.PLANNED)
        assert cycle.unfinished is kept
        assert cycle.next_epoch == 3
        assert not cycle.must_end_before(2)
        assert cycle.must_end_before(4)
    assert not cycle.take_up(2)
    assert cycle.take_up(3)
    assert (cycle.current, cycle.phase) == (kept, Phase.RESTORED)
    assert not cycle.take_up(3)


def test_closing_an_earlier_epoch_keeps_the_one_that_was_set_aside():
    cycle = restored(3)
    kept = cycle.current
    cycle.follow(plan(1), 4)
    cycle.close()
    assert (cycle.phase, cycle.unfinished, cycle.next_epoch) == (Phase.ENDED, kept, 3)
    assert not cycle.ended_here


def test_ending_the_epoch_that_was_set_aside_leaves_the_current_one_open():
    cycle = restored(3)
    kept = cycle.current
    cycle.follow(plan(1), 4)
    cycle.drive("a loop")
    cycle.end(kept)
    assert (cycle.epoch, cycle.phase, cycle.unfinished) == (1, Phase.PLANNED, None)
    assert cycle.driven
    assert cycle.ended_here


def test_a_state_that_is_restored_replaces_one_that_was_set_aside():
    cycle = restored(3)
    cycle.follow(plan(1), 4)
    cycle.restore(Progress(plan(5), 4), Phase.PLANNED)
    assert cycle.unfinished is None
    assert cycle.next_epoch == 5


def test_only_the_driver_or_anybody_without_a_name_lets_go():
    cycle = made()
    first, second = object(), object()
    cycle.drive(first)
    cycle.let_go(second)
    assert cycle.driven
    assert cycle.named
    cycle.let_go(first)
    assert not cycle.driven
    cycle.drive(second)
    cycle.let_go()
    assert not cycle.driven
    cycle.drive(second)
    cycle.begin(4)
    cycle.end(cycle.current)
    assert not cycle.driven


@pytest.mark.parametrize("read", ["read_sampler", "read_plan"])
def test_a_complete_epoch_that_is_read_again_takes_no_more(read):
    cycle = made()
    getattr(cycle, read)()
    cycle.begin(10)
    cycle.add(3)
    cycle.limit = 7
    getattr(cycle, read)()
    assert (cycle.room(), cycle.limit) == (7, 7)
    cycle.add(1)
    getattr(cycle, read)()
    assert (cycle.room(), cycle.limit) == (0, 1)
    assert (cycle.sampler_read, cycle.plan_read) == (read == "read_sampler", read == "read_plan")
    cycle.follow(plan(1), 4)
    assert not cycle.sampler_read
    assert not cycle.plan_read


def test_reading_an_epoch_that_has_not_begun_changes_no_limit():
    cycle = restored()
    cycle.current.samples = 4
    cycle.read_sampler()
    cycle.begin(10)
    assert cycle.room() == 6


def test_pending_batches_are_counted_before_anybody_asks_and_only_once():
    counted: list[object] = []
    cycle = made()
    cycle.count = counted.extend
    for ask in ("phase", "current", "unfinished", "next_epoch", "is_open"):
        cycle.pending.append(ask)
        getattr(cycle, ask)
        getattr(cycle, ask)
        assert counted.pop() == ask
        assert not counted
        assert not cycle.pending


def test_a_batch_that_cannot_be_counted_is_not_counted_again():
    cycle = made()

    def refuse(batches):
        raise ValueError

    cycle.count = refuse
    cycle.pending.append("wrong")
    with pytest.raises(ValueError):  # noqa: PT011
        cycle.settle()
    cycle.settle()
