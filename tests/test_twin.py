"""The package and its slow twin agree on schedules and counts, and on which kept sets are valid."""

import math
import random
import warnings

import numpy as np
import pytest
import reference as twin
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fineprune as fp

# For each tolerance p/q, the numbers q + p and q - p are powers of two or primes larger than any
# batch in these tests. Therefore, mean + tolerance * |mean| can equal a loss (a multiple of 1/64)
# only if the mean is exact in binary, so that no result depends on rounding.
TOLERANCES = [0.0, 3 / 64, 9 / 32, 15 / 16]
LARGEST_SET = 12
LARGEST_BATCH = 22


def quiet(examples):
    return settings(max_examples=examples, derandomize=True, deadline=None)


# --- Algorithm 2 -----------------------------------------------------------------------------

knobs = {
    "attenuation": st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0]),
    "attenuate": st.sampled_from(["window", "epoch"]),
}
blocks = st.integers(1, 5).flatmap(lambda b: st.tuples(st.just(b), st.integers(1, b)))


@quiet(150)
@given(
    epochs=st.integers(1, 70),
    window=st.integers(1, 25),
    share=st.floats(0, 1),
    block=blocks,
    **knobs,
)
def test_one_window(epochs, window, share, block, attenuation, attenuate):
    start = int(share * window)
    rest = (attenuation, *block, attenuate)
    schedule = fp.Schedule(epochs, window, start, *rest)
    expected = [twin.prunes_constant(e, window, start, *rest) for e in range(1, epochs + 1)]
    assert [schedule.prunes(epoch) for epoch in range(epochs)] == expected
    assert schedule.pruned_epochs() == sum(expected)
    assert [schedule.clears(epoch) for epoch in range(epochs)] == [
        twin.clears_constant(e, window) for e in range(1, epochs + 1)
    ]
    # The two ways in which the twin states this rule agree.
    windows = twin.constant_windows(epochs, window, start)
    assert [twin.prunes_windows(e, windows, *rest) for e in range(1, epochs + 1)] == expected


@quiet(100)
@given(
    epochs=st.integers(1, 300),
    window=st.integers(1, 80),
    share=st.floats(0, 1),
    block=blocks,
)
def test_the_closed_forms(epochs, window, share, block):
    start = int(share * window)
    schedule = fp.Schedule(epochs, window, start, 2.0, *block)
    expected = twin.closed_form(epochs, window, start, *block)
    assert fp.closed_form_pruned_epochs(schedule) == expected


@quiet(150)
@given(
    intervals=st.lists(st.integers(4, 20), min_size=1, max_size=4),
    last=st.integers(4, 20),
    number=st.integers(1, 4),
    share=st.integers(0, 20).map(lambda n: n / 20),
    block=blocks,
    **knobs,
)
def test_windows_from_milestones(intervals, last, number, share, block, attenuation, attenuate):
    milestones = [sum(intervals[: i + 1]) for i in range(len(intervals))]
    epochs = milestones[-1] + last
    rest = (attenuation, *block, attenuate)
    schedule = fp.Schedule.from_milestones(
        epochs,
        milestones,
        windows_per_interval=number,
        start=share,
        attenuation=attenuation,
        block=block[0],
        count=block[1],
        attenuate=attenuate,
    )
    windows = twin.windows_from_milestones(epochs, milestones, number, share)
    every = range(1, epochs + 1)
    assert [schedule.clears(e - 1) for e in every] == [
        twin.clears_windows(e, windows) for e in every
    ]
    expected = [twin.prunes_windows(e, windows, *rest) for e in every]
    assert [schedule.prunes(e - 1) for e in every] == expected
    assert schedule.pruned_epochs() == sum(expected)


@quiet(60)
@given(n=st.integers(2, 500), percent=st.integers(1, 99))
def test_a_share_of_the_set(n, percent):
    share = percent / 100
    skipped = twin.number_skipped(n, share)
    assume(skipped > 0)
    pruner = fp.Pruner(n, fp.FinePruning(fp.Schedule(1, 1, 0), prune=share))
    pruner.set_epoch(0)
    assert n - len(pruner.plan.kept) == skipped


# --- Algorithm 1, epoch by epoch -------------------------------------------------------------


def draw_losses(kind, number, rng):
    """Draw losses that are exact in float32 and, except for "any", multiples of 1/64."""
    sixty_fourths = {
        "few values": lambda: rng.randrange(4) * 16,
        "equal": lambda: 37,
        "spread": lambda: rng.randrange(1000),
        "negative": lambda: rng.randrange(-1000, 200),
        "zero": lambda: 0,
    }
    if kind == "not finite":
        odd = [math.nan, math.inf, -math.inf]
        losses = [
            rng.choice(odd) if rng.random() < 0.3 else rng.randrange(300) / 64
            for _ in range(number)
        ]
    elif kind == "any":
        losses = [
            float(np.float32(rng.gauss(1, 2) * 10.0 ** rng.randrange(-20, 20)))
            for _ in range(number)
        ]
    else:
        losses = [sixty_fourths[kind]() / 64 for _ in range(number)]
    return losses


KINDS = ["few values", "equal", "spread", "negative", "zero", "not finite"]


def draw_batches(kept, kind, rng):
    """Draw the batches of an epoch, with some samples repeated or left out."""
    indices = list(kept)
    rng.shuffle(indices)
    if rng.random() < 0.3:
        # A single batch that is larger than the set.
        groups = [indices + rng.choices(indices, k=LARGEST_BATCH - LARGEST_SET)]
    else:
        size = rng.randrange(1, 6)
        groups = [indices[i : i + size] for i in range(0, len(indices), size)]
        for group in groups:
            if rng.random() < 0.4:
                group += rng.choices(indices, k=rng.randrange(1, 4))
        if rng.random() < 0.2:
            groups = [group for group in groups if rng.random() < 0.6]
    return [list(zip(group, draw_losses(kind, len(group), rng), strict=True)) for group in groups]


def record(pruner, batches):
    for batch in batches:
        index = torch.tensor([i for i, _ in batch], dtype=torch.int64)
        losses = torch.tensor([loss for _, loss in batch], dtype=torch.float32)
        untouched = (index.clone(), losses.clone())
        scalar = pruner.record(index, losses)
        torch.testing.assert_close(scalar, losses.mean(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(index, untouched[0])
        torch.testing.assert_close(losses, untouched[1], rtol=0, atol=0, equal_nan=True)


def end_epoch(pruner, batches):
    """End the epoch, and require a warning if and only if some loss was not finite."""
    if twin.nonfinite_losses(batches):
        with pytest.warns(RuntimeWarning):
            pruner.end_epoch()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pruner.end_epoch()


def check_plan(plan, epoch, counts, skipped):
    assert plan.epoch == epoch
    assert plan.kept.dtype == torch.int64
    assert plan.kept.ndim == 1
    assert plan.weights is None
    assert twin.why_invalid(counts, plan.kept.tolist(), skipped) is None


@quiet(120)
@given(
    n=st.integers(1, LARGEST_SET),
    prune_share=st.floats(0, 0.999),
    epochs=st.integers(1, 9),
    window=st.integers(1, 5),
    start_share=st.floats(0, 1),
    block=blocks,
    tolerance=st.sampled_from(TOLERANCES),
    kind=st.sampled_from([*KINDS, "mixed"]),
    seed=st.integers(0, 2**31),
    **knobs,
)
def test_a_whole_training(
    n,
    prune_share,
    epochs,
    window,
    start_share,
    block,
    tolerance,
    kind,
    seed,
    attenuation,
    attenuate,
):
    rng = random.Random(seed)
    prune = int(prune_share * n)
    rest = (attenuation, *block, attenuate)
    start = int(start_share * window)
    schedule = fp.Schedule(epochs, window, start, *rest)
    pruner = fp.Pruner(n, fp.FinePruning(schedule, prune, tolerance=tolerance), seed=seed)
    counts = [0] * n
    for e in range(1, epochs + 1):
        pruner.set_epoch(e - 1)
        skipped = prune if twin.prunes_constant(e, window, start, *rest) else 0
        check_plan(pruner.plan, e - 1, counts, skipped)
        assert len(pruner.sampler) == n - skipped
        batches = draw_batches(
            pruner.plan.kept.tolist(), rng.choice(KINDS) if kind == "mixed" else kind, rng
        )
        record(pruner, batches)
        assert pruner.counts.tolist() == counts, "counts changed before the end of the epoch"
        end_epoch(pruner, batches)
        counts = twin.counts_after_epoch(
            counts, twin.marks_of_epoch(batches, tolerance), twin.clears_constant(e, window)
        )
        assert pruner.counts.tolist() == counts


@quiet(30)
@given(
    n=st.integers(4, LARGEST_SET),
    intervals=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    number=st.integers(1, 2),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**31),
)
def test_a_whole_training_with_milestones(n, intervals, number, kind, seed):
    rng = random.Random(seed)
    milestones = [sum(intervals[: i + 1]) for i in range(len(intervals))]
    epochs = milestones[-1] + 3
    schedule = fp.Schedule.from_milestones(epochs, milestones, number, start=0.5)
    windows = twin.windows_from_milestones(epochs, milestones, number, 0.5)
    pruner = fp.Pruner(n, fp.FinePruning(schedule, n // 3), seed=seed)
    counts = [0] * n
    for e in range(1, epochs + 1):
        pruner.set_epoch(e - 1)
        check_plan(pruner.plan, e - 1, counts, n // 3 if twin.prunes_windows(e, windows) else 0)
        batches = draw_batches(pruner.plan.kept.tolist(), kind, rng)
        record(pruner, batches)
        end_epoch(pruner, batches)
        counts = twin.counts_after_epoch(
            counts, twin.marks_of_epoch(batches), twin.clears_windows(e, windows)
        )
        assert pruner.counts.tolist() == counts


@quiet(60)
@given(n=st.integers(1, LARGEST_SET), seed=st.integers(0, 2**31))
def test_losses_of_any_size(n, seed):
    # The losses span forty orders of magnitude, so their float64 sums are not exact. This does not
    # matter, because no loss is so close to its mean that rounding decides.
    rng = random.Random(seed)
    pruner = fp.Pruner(n, fp.FinePruning(fp.Schedule(2, 2, 1), 0))
    pruner.set_epoch(0)
    batches = draw_batches(range(n), "any", rng)
    for batch in batches:
        losses = [loss for _, loss in batch]
        mean = math.fsum(losses) / len(losses)
        scale = max(abs(loss) for loss in losses)
        assume(all(loss == mean or abs(loss - mean) >= 1e-12 * scale for loss in losses))
    record(pruner, batches)
    end_epoch(pruner, batches)
    expected = twin.counts_after_epoch([0] * n, twin.marks_of_epoch(batches), False)
    assert pruner.counts.tolist() == expected


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-30, 3e38, -0.7, 0.0])
@pytest.mark.parametrize("size", [1, 3, 7, 22, 1000])
def test_equal_losses_never_exceed_their_mean(value, size):
    pruner = fp.Pruner(size, fp.FinePruning(fp.Schedule(2, 2, 1), 0))
    pruner.set_epoch(0)
    pruner.record(torch.arange(size), torch.full((size,), value))
    pruner.end_epoch()
    assert pruner.counts.tolist() == [0] * size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_losses_of_any_floating_type(dtype):
    pruner = fp.Pruner(4, fp.FinePruning(fp.Schedule(2, 2, 1), 1))
    pruner.set_epoch(0)
    pruner.record(torch.tensor([2, 0, 3, 1]), torch.tensor([4, 1, 1, 3], dtype=dtype))
    pruner.end_epoch()
    assert pruner.counts.tolist() == [0, 1, 1, 0]


def test_counts_pass_255_in_a_long_window():
    epochs = 300
    pruner = fp.Pruner(2, fp.FinePruning(fp.Schedule(epochs, 400, 400), 1))
    for epoch in range(epochs):
        pruner.set_epoch(epoch)
        pruner.record(torch.tensor([0, 1]), torch.tensor([0.5, 1.5]))
        pruner.end_epoch()
    assert pruner.counts.tolist() == [0, epochs]


def test_counts_fill_a_window_of_255():
    pruner = fp.Pruner(2, fp.FinePruning(fp.Schedule(600, 255, 255), 1))
    counts = [0, 0]
    for e in range(1, 601):
        pruner.set_epoch(e - 1)
        pruner.record(torch.tensor([0, 1]), torch.tensor([0.5, 1.5]))
        pruner.end_epoch()
        counts = twin.counts_after_epoch(counts, {1}, twin.clears_constant(e, 255))
        assert pruner.counts.tolist() == counts


def test_an_epoch_at_a_boundary_prunes_by_the_old_window_and_opens_the_new_one():
    # With start = 0, e = 2 (position 0) prunes by the mark of e = 1 and keeps its own marks.
    pruner = fp.Pruner(4, fp.FinePruning(fp.Schedule(3, 2, 0), 1))
    pruner.set_epoch(0)
    first = pruner.plan.kept
    losses = torch.tensor([0.0, 0.0, 8.0])
    pruner.record(first, losses)
    pruner.end_epoch()
    worst = int(first[2])
    assert pruner.counts is not None
    assert pruner.counts[worst] == 1
    pruner.set_epoch(1)
    assert worst not in pruner.plan.kept.tolist()
    pruner.record(pruner.plan.kept, torch.tensor([8.0, 0.0, 0.0]))
    opener = int(pruner.plan.kept[0])
    pruner.end_epoch()
    assert pruner.counts.tolist() == [int(index == opener) for index in range(4)]


def test_a_batch_with_no_finite_loss_marks_nothing():
    pruner = fp.Pruner(4, fp.FinePruning(fp.Schedule(2, 2, 1), 1))
    pruner.set_epoch(0)
    pruner.record(torch.tensor([0, 1]), torch.tensor([math.nan, math.inf]))
    pruner.record(torch.tensor([2, 3]), torch.tensor([1.0, 2.0]))
    with pytest.warns(RuntimeWarning, match="2"):
        pruner.end_epoch()
    assert pruner.counts.tolist() == [0, 0, 0, 1]


def test_a_large_set():
    # The set is so large that everything that is done in blocks needs several of them.
    n, skipped = 300_000, 100_001
    chance = torch.Generator().manual_seed(1)
    pruner = fp.Pruner(n, fp.FinePruning(fp.Schedule(3, 3, 2), skipped))
    pruner.set_epoch(0)
    index = torch.randperm(n, generator=chance)
    losses = torch.randint(0, 2, (n,), generator=chance).float()
    pruner.record(index, losses)
    pruner.end_epoch()
    batch = list(zip(index.tolist(), losses.tolist(), strict=True))
    counts = twin.counts_after_epoch([0] * n, twin.marks_of_batch(batch), False)
    pruner.set_epoch(1)
    assert pruner.counts.tolist() == counts
    check_plan(pruner.plan, 1, counts, skipped)
    # About half of the set is tied. Each part of the set keeps the same share of the ties.
    kept = torch.zeros(n)
    kept[pruner.plan.kept] = 1
    shares = torch.stack([part.mean() for part in kept.split(30_000)])
    assert (shares - shares.mean()).abs().max() < 0.02


# --- a control -------------------------------------------------------------------------------


@quiet(30)
@given(n=st.integers(2, 40), data=st.data(), seed=st.integers(0, 2**31))
def test_random_pruning_skips_as_many_in_the_same_epochs(n, data, seed):
    prune = data.draw(st.integers(1, n - 1))
    schedule = fp.Schedule(8, 4, 2)
    pruner = fp.Pruner(n, fp.RandomPruning(schedule, prune), seed=seed)
    for e in range(1, 9):
        pruner.set_epoch(e - 1)
        skipped = prune if twin.prunes_constant(e, 4, 2) else 0
        # If all counts are equal, any kept set of the right size is valid.
        check_plan(pruner.plan, e - 1, [0] * n, skipped)
        pruner.end_epoch()
