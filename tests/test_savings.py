"""The predicted savings agree with numbers that were counted by hand and with a Pruner."""

import pytest

import fineprune as fp


def test_steps_and_time_of_a_schedule_counted_by_hand():
    # Positions 2 and 3 of each window of 4 prune: 30 of 100 samples, in batches of 10.
    policy = fp.FinePruning(fp.Schedule(8, window=4, start=2), prune=30)
    savings = fp.predict_savings(policy, 100, 10, step_time=0.5, overhead=0.25)
    assert savings.pruned_epochs == 4
    assert (savings.steps, savings.steps_full) == (4 * 10 + 4 * 7, 80)
    assert (savings.samples, savings.samples_full) == (4 * 100 + 4 * 70, 800)
    assert savings.time_full == 40.0
    assert savings.time == 34.0 + 4 * 0.25
    assert savings.saving == pytest.approx(1 - 35 / 40)
    assert savings.skipped_share == pytest.approx(120 / 800)
    steps = fp.predict_savings(policy, 100, 10)
    assert steps.time is None
    assert steps.saving == pytest.approx(1 - 68 / 80)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (4, 1), (2, 3)])
def test_a_pruner_counts_the_same_steps(replicas, accumulation, drop_last):
    schedule = fp.Schedule(200, window=60, start=30, attenuation=2.0, block=3, count=2)
    policy = fp.RandomPruning(schedule, 0.4)
    shape = {"accumulation": accumulation, "drop_last": drop_last, "num_replicas": replicas}
    pruner = fp.Pruner(5_003, policy, batch_size=16, rank=0, **shape)
    assert fp.predict_savings(policy, 5_003, 16, **shape).steps == pruner.total_steps()
