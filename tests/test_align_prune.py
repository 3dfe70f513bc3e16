"""AlignPrune: a slow twin written from the rule, correlations, and wrong labels that it skips."""

import math
import statistics

import numpy as np
import pytest
import torch
from resuming import assert_plans, falling_losses, train_pruner

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning import alignment as module
from fineprune.pruning.alignment import alignment
from fineprune.pruning.random_streams import stream

N, BATCH, EPOCHS, TRAJECTORY = 250, 25, 12, 4
CLEAN = [3, 40, 77, 111, 200, 249]

falling = falling_losses(N)


def made(save=0.3, **options):
    policy = fp.AlignPrune(EPOCHS, save, **{"trajectory": TRAJECTORY, **options})
    return fp.Pruner(N, policy, batch_size=BATCH, seed=5)


def twin(numbers, losses_of, reference, seed):
    """The rule, sample by sample: the kept samples with their weights, per epoch."""
    seen: list[dict[int, float]] = []  # The losses of the trained samples, per epoch.
    for epoch, number in enumerate(numbers):
        scores = scores_of(seen, reference)
        mean = statistics.fmean(scores.values()) if scores else 0.0
        below = [sample for sample in range(N) if sample in scores and scores[sample] < mean]
        rest = [sample for sample in range(N) if sample not in below]
        rng = stream(seed, epoch, "select")
        kept = {}
        missing = N - number
        for group in (below, rest):
            most = min(missing, len(group))
            skipped = rng.choice(group, most, replace=False, shuffle=False) if number < N else []
            missing -= len(skipped)
            left = [sample for sample in group if sample not in skipped]
            kept.update(dict.fromkeys(left, len(group) / max(len(left), 1)))
        yield kept
        index = torch.tensor(sorted(kept))
        seen.append(dict(zip(sorted(kept), losses_of(epoch, index).tolist(), strict=True)))


def scores_of(seen, reference):
    """The last losses in the first epochs; later, the correlations with the clean samples."""
    last = {sample: loss for losses in seen for sample, loss in losses.items()}
    if len(seen) < TRAJECTORY:
        return last
    if reference is None:
        means = {
            sample: statistics.fmean(losses[sample] for losses in seen if sample in losses)
            for sample in last
        }
        reference = sorted(means, key=lambda sample: means[sample])[: math.ceil(N / 100)]
    window = seen[-TRAJECTORY:]
    scores = {}
    for sample in last:
        own, clean = [], []
        for losses in window:
            known = [losses[one] for one in reference if one in losses]
            if sample in losses and known:
                own.append(losses[sample])
                clean.append(statistics.fmean(known))
        if len(set(own)) > 1 and len(set(clean)) > 1:
            scores[sample] = statistics.correlation(own, clean)
    return scores


@pytest.mark.parametrize("save", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("anneal", [0.0, 0.25])
@pytest.mark.parametrize("reference", [CLEAN, None])
def test_the_plans_equal_those_of_a_twin(save, anneal, reference):
    pruner = made(save, anneal=anneal, reference=reference)
    numbers = [pruner.step_counts.num_kept(epoch) for epoch in range(EPOCHS)]
    assert_plans(train_pruner(pruner, falling)[0], twin(numbers, falling, reference, 5))


# Correlations


def test_complete_trajectories_have_the_correlation_of_numpy():
    losses = np.random.default_rng(0).random((6, 30), dtype=np.float32)
    means = losses[:, [4, 9]].astype(np.float64).mean(1)
    expected = [np.corrcoef(losses[:, sample], means)[0, 1] for sample in range(30)]
    assert alignment(losses, np.array([4, 9])) == pytest.approx(expected)


def test_many_samples_are_compared_in_blocks(monkeypatch):
    losses = np.random.default_rng(0).random((5, 40), dtype=np.float32)
    losses[np.random.default_rng(1).random((5, 40)) < 0.3] = np.nan
    whole = alignment(losses, np.arange(7))
    monkeypatch.setattr(module, "_BLOCK", 7)
    assert np.array_equal(alignment(losses, np.arange(7)), whole, equal_nan=True)


@pytest.mark.parametrize(
    "losses",
    [
        [math.nan] * 4,
        [1.0, math.nan, math.nan, math.nan],
        [0.7] * 4,
        [math.nan, 1.0, math.nan, 2.0],  # In the second epoch, no clean sample was trained.
    ],
)
def test_a_correlation_that_is_undefined_is_nan(losses):
    clean = [4.0, math.nan, 2.0, 1.0]
    scores = alignment(np.array([losses, clean], np.float32).T.copy(), np.array([1]))
    assert math.isnan(scores[0])
    assert scores[1] == pytest.approx(1.0)


def test_losses_that_are_not_finite_are_left_out():
    def losses(epoch, index):
        return torch.where((index == 8) & (epoch % 2 == 1), torch.inf, falling(epoch, index))

    pruner = made(0.1, reference=CLEAN)
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        train_pruner(pruner, losses)
    state = pruner.policy.state_dict()
    assert not state["trajectories"].isinf().any()
    assert not state["means"].isinf().any()


# Settings and states


def test_a_state_of_other_clean_samples_is_refused():
    state = made(reference=CLEAN).state_dict()
    with pytest.raises(InputError, match=r"expected a pruner state with .*reference"):
        made(reference=[1, 2]).load_state_dict(state)
    made(reference=CLEAN[::-1]).load_state_dict(state)


@pytest.mark.parametrize(
    "reference", [(1, 5), np.array([5, 1]), torch.tensor([5, 1]), range(1, 6, 4)]
)
def test_indices_may_have_any_type(reference):
    assert fp.AlignPrune(20, reference=reference).reference == (1, 5)


def test_an_index_that_no_sample_has_is_refused():
    policy = fp.AlignPrune(20, reference=[3, 60])
    with pytest.raises(InputError, match="indices below 60, the number of samples, got 60: give"):
        fp.Pruner(60, policy)
    assert fp.Pruner(61, policy).policy.settings()["reference"] == (3, 60)
