"""Which epochs prune: worked examples, wrong input, and the ways to make a schedule."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fineprune as fp

PAPER: dict[str, Any] = {
    "epochs": 200,
    "window": 60,
    "start": 30,
    "attenuation": 2,
    "block": 3,
    "count": 2,
}


def pruned(schedule):
    return [epoch for epoch in range(schedule.epochs) if schedule.prunes(epoch)]


def cleared(schedule):
    return [epoch for epoch in range(schedule.epochs) if schedule.clears(epoch)]


def one_line(error, *parts):
    message = str(error.value)
    assert message
    assert "\n" not in message
    for part in parts:
        assert part in message, f"{part!r} is not named in {message!r}"


# --- worked examples -------------------------------------------------------------------------


def test_the_worked_example_prunes_97_epochs():
    assert fp.Schedule(**PAPER).pruned_epochs() == 97


def test_the_literal_reading_prunes_112_epochs():
    assert fp.Schedule(**PAPER, attenuate="epoch").pruned_epochs() == 112


def test_the_closed_form_as_printed_says_54():
    number = fp.closed_form_pruned_epochs(fp.Schedule(**PAPER))
    assert number == 54
    assert isinstance(number, int)


def test_the_closed_form_needs_one_window():
    schedule = fp.Schedule.from_milestones(200, [60, 120, 160], start=0.5)
    with pytest.raises(ValueError, match="window") as error:
        fp.closed_form_pruned_epochs(schedule)
    one_line(error)


def test_epochs_count_from_0_where_the_paper_counts_from_1():
    # The positions of e = 1..9 are 1 2 3 0 1 2 3 0 1. Those at positions 2 and 3 prune.
    schedule = fp.Schedule(epochs=9, window=4, start=2)
    assert [epoch + 1 for epoch in pruned(schedule)] == [2, 3, 6, 7]
    assert [epoch + 1 for epoch in cleared(schedule)] == [4, 8]


def test_block_and_count_go_by_the_epoch_of_the_whole_training():
    # Position >= 1 holds for e = 1 2 3 5 6 7 9 10, and e mod 3 < 2 excludes 2 and 5.
    schedule = fp.Schedule(epochs=10, window=4, start=1, block=3, count=2)
    assert [epoch + 1 for epoch in pruned(schedule)] == [1, 3, 6, 7, 9, 10]


def test_a_boundary_still_has_the_start_of_the_window_that_ends_there():
    # The start is 1, then 0 from e = 5 on: e = 4 does not prune, e = 8 does, both at position 0.
    schedule = fp.Schedule(epochs=9, window=4, start=1, attenuation=2)
    assert [epoch + 1 for epoch in pruned(schedule)] == [1, 2, 3, 5, 6, 7, 8, 9]


def test_the_start_is_cut_to_an_integer_at_every_attenuation():
    # 5 -> int(3.33) = 3 -> int(2) = 2 -> int(1.33) = 1; 5 / 1.5**3 alone would give 1.48.
    schedule = fp.Schedule(epochs=23, window=6, start=5, attenuation=1.5)
    positions = [(epoch + 1) // 6 * 10 + (epoch + 1) % 6 for epoch in pruned(schedule)]
    assert positions == [5, 13, 14, 15, 22, 23, 24, 25, 31, 32, 33, 34, 35]


# --- wrong input -----------------------------------------------------------------------------

GOOD: dict[str, Any] = {"epochs": 20, "window": 5, "start": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", -3),
        ("epochs", 2.5),
        ("window", 0),
        ("window", -5),
        ("window", 2.5),
        ("start", -1),
        ("start", 1.5),
        ("attenuation", 0.5),
        ("attenuation", 0),
        ("attenuation", -2.0),
        ("attenuation", float("nan")),
        ("block", 0),
        ("block", -1),
        ("block", 1.5),
        ("count", -1),
        ("count", 0.5),
        ("attenuate", "weekly"),
    ],
)
def test_wrong_settings_are_named_with_what_was_given(name, value):
    with pytest.raises(ValueError, match=name) as error:
        fp.Schedule(**{**GOOD, name: value})
    one_line(error, str(value))


@pytest.mark.parametrize("ask", ["prunes", "clears"])
@pytest.mark.parametrize("epoch", [-1, 20, 1000])
def test_an_epoch_out_of_range_is_an_error(ask, epoch):
    schedule = fp.Schedule(**GOOD)
    with pytest.raises(ValueError, match="epoch") as error:
        getattr(schedule, ask)(epoch)
    one_line(error, str(epoch))


@pytest.mark.parametrize(
    ("milestones", "number", "start", "name"),
    [
        *((wrong, 1, 0.5, "milestones") for wrong in ([10, 5], [5, 5], [0, 5], [-5, 5], [2.5])),
        *(([10], wrong, 0.5, "windows_per_interval") for wrong in (0, -1, 1.5)),
        ([3, 10], 5, 0.5, "at most 3 windows_per_interval.* got 5"),
        *(([10], 1, wrong, "start") for wrong in (-0.1, 1.5, float("nan"))),
    ],
)
def test_windows_that_cannot_be_made_are_an_error(milestones, number, start, name):
    with pytest.raises(ValueError, match=name) as error:
        fp.Schedule.from_milestones(20, milestones, number, start=start)
    one_line(error)


# --- from_milestones -------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    window=st.integers(1, 12),
    epochs=st.integers(1, 50),
    eighths=st.integers(0, 8),
    attenuation=st.sampled_from([1.0, 1.5, 2.0]),
    attenuate=st.sampled_from(["window", "epoch"]),
)
def test_even_milestones_equal_one_window(window, epochs, eighths, attenuation, attenuate):
    milestones = list(range(window, epochs, window))
    rest = {"attenuation": attenuation, "block": 3, "count": 2, "attenuate": attenuate}
    plain = fp.Schedule(epochs, window, eighths * window // 8, **rest)
    assume(milestones)  # A single interval does not determine the spacing.
    made = fp.Schedule.from_milestones(epochs, milestones, start=eighths / 8, **rest)
    assert made == plain
    assert cleared(made) == cleared(plain)
    assert pruned(made) == pruned(plain)


def test_schedules_that_differ_are_not_equal():
    assert fp.Schedule(**GOOD) == fp.Schedule(**GOOD)
    assert fp.Schedule(**GOOD) != fp.Schedule(**{**GOOD, "start": 3})
    assert fp.Schedule(**GOOD) != fp.Schedule(**{**GOOD, "window": 6})
    assert fp.Schedule(**GOOD) != fp.Schedule(**{**GOOD, "block": 2})


def test_the_rate_changes_of_the_paper_bound_the_windows():
    # The intervals are 60, 60, 40 and 40 long. The counts are cleared at the end of each.
    schedule = fp.Schedule.from_milestones(200, [60, 120, 160], start=0.5)
    assert [epoch + 1 for epoch in cleared(schedule)] == [60, 120, 160, 200]
    expected = [*range(30, 60), *range(90, 120), *range(140, 160), *range(180, 200)]
    assert [epoch + 1 for epoch in pruned(schedule)] == expected


def test_an_interval_is_cut_at_rounded_parts():
    # In 3 windows, 10 epochs are cut at 3, 7 and 10; 4 at 1, 3 and 4; and 7 at 2, 5 and 7.
    schedule = fp.Schedule.from_milestones(21, [10, 14], 3, start=1.0)
    assert [epoch + 1 for epoch in cleared(schedule)] == [3, 7, 10, 11, 13, 14, 16, 19, 21]


def test_an_even_spacing_goes_on_past_the_end_of_training():
    # 25 is not a boundary, because the last window would be 21..30.
    schedule = fp.Schedule.from_milestones(25, [10, 20], start=0.5)
    assert [epoch + 1 for epoch in cleared(schedule)] == [10, 20]
    assert [epoch + 1 for epoch in pruned(schedule)] == [*range(5, 10), *range(15, 20), 25]


def test_the_start_is_a_share_of_each_window():
    # The windows are 6, 4 and 3 long and start at 3, 2 and 1. The last ends with the training.
    schedule = fp.Schedule.from_milestones(13, [6, 10], start=0.5)
    assert [epoch + 1 for epoch in pruned(schedule)] == [3, 4, 5, 8, 9, 11, 12]
    assert [epoch + 1 for epoch in cleared(schedule)] == [6, 10, 13]


def test_a_boundary_has_the_start_of_the_window_that_ends_there_whatever_the_lengths():
    # The starts are 1 and int(3 / 4) = 0. At position 0, e = 3 does not prune, but e = 10 does.
    schedule = fp.Schedule.from_milestones(20, [3, 10], start=0.5, attenuation=4)
    assert [epoch + 1 for epoch in pruned(schedule)] == [1, 2, *range(4, 21)]


def test_a_share_with_no_exact_binary_form_is_not_cut_short():
    # 0.29 * 100 is 28.999999999999996 in binary.
    schedule = fp.Schedule.from_milestones(200, [100], start=0.29)
    assert pruned(schedule)[0] + 1 == 29
