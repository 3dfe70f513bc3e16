"""FinePruning.for_saving finds a schedule that saves a given share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.savings import predict_savings

SAMPLES = 10_000


@given(
    epochs=st.integers(1, 80),
    save=st.floats(0.01, 0.5),
    milestones=st.sets(st.integers(1, 80), max_size=3).map(sorted),
)
def test_the_share_is_saved_to_one_sample_per_epoch(epochs, save, milestones):
    policy = fp.FinePruning.for_saving(epochs, save, milestones)
    savings = predict_savings(policy, SAMPLES, batch_size=1)
    assert save - 1 / SAMPLES < savings.skipped_share <= save + 1e-9
    assert policy.prune <= 0.5


def test_pruning_starts_as_late_as_half_of_the_samples_suffice():
    policy = fp.FinePruning.for_saving(200, 0.2, [60, 120, 160])
    assert policy.schedule.start == (30, 30, 20)
    earlier = fp.FinePruning.for_saving(200, 0.35, [60, 120, 160])
    assert earlier.schedule.prunes(25)
    assert not policy.schedule.prunes(25)
    assert earlier.prune <= 0.5


def test_more_than_half_is_saved_by_pruning_every_epoch():
    policy = fp.FinePruning.for_saving(40, 0.8, [20])
    assert policy.schedule.start == 0
    assert policy.prune == pytest.approx(0.8)


@pytest.mark.parametrize("save", [0, 1, -0.1, 1.5, float("nan")])
def test_a_share_outside_its_range_is_refused(save):
    with pytest.raises(InputError, match=r"expected save as a share in \(0, 1\)"):
        fp.FinePruning.for_saving(10, save)
