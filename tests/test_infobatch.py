"""InfoBatch: a slow twin written from the paper, and exact shares."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resuming import falling_losses, train_pruner

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.random_streams import stream

N, BATCH, EPOCHS = 60, 5, 8


losses_of = falling_losses(N)


def train(pruner, losses=losses_of):
    return train_pruner(pruner, losses)[0]


def twin(seed, prune, anneal):
    """The published form, sample by sample: the kept samples with their weights, per epoch."""
    last: dict[int, float] = {}
    plans = []
    for epoch in range(EPOCHS):
        weight_of = {}
        mean = sum(last.values()) / len(last) if last else 0.0
        rng = stream(seed, epoch, "select")
        for sample in range(N):
            annealed = epoch >= int(EPOCHS * (1 - anneal))
            below = sample in last and last[sample] < mean
            if annealed or not below:
                weight_of[sample] = 1.0
            elif rng.random() >= prune:
                weight_of[sample] = 1 / (1 - prune)
        for sample in weight_of:
            last[sample] = losses_of(epoch, torch.tensor([sample])).item()
        plans.append(weight_of)
    return plans


@pytest.mark.parametrize("prune", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("anneal", [0.0, 0.125, 0.5])
def test_the_published_form_equals_a_twin_written_from_the_paper(prune, anneal):
    plans = train(fp.Pruner(N, fp.InfoBatch(EPOCHS, prune, anneal=anneal), seed=4))
    for (kept, weights), expected in zip(plans, twin(4, prune, anneal), strict=True):
        assert kept == sorted(expected)
        given = weights or [1.0] * len(kept)
        assert given == pytest.approx([expected[sample] for sample in kept])


def test_half_of_the_samples_below_the_mean_are_skipped_by_default():
    policy = fp.InfoBatch(EPOCHS)
    assert (policy.prune, policy.anneal) == (0.5, 0.125)
    plans = train(fp.Pruner(N, policy))
    numbers = [len(kept) for kept, _ in plans]
    assert numbers[0] == numbers[-1] == N
    assert all(N / 2 < number < N for number in numbers[1:-1])


def test_samples_without_a_finite_loss_are_always_kept():
    def losses(epoch, index):
        return torch.where(index % 2 == 0, torch.tensor(torch.nan), losses_of(epoch, index))

    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        plans = train(fp.Pruner(N, fp.InfoBatch(EPOCHS, 0.9)), losses)
    assert all(set(range(0, N, 2)) <= set(kept) for kept, _ in plans)
    assert len(plans[1][0]) < N


def test_without_rescaling_there_are_no_weights():
    plans = train(fp.Pruner(N, fp.InfoBatch(EPOCHS, rescale=False)))
    weighted = train(fp.Pruner(N, fp.InfoBatch(EPOCHS)))
    assert all(weights is None for _, weights in plans)
    assert [kept for kept, _ in plans] == [kept for kept, _ in weighted]


# The form with an exact share


@pytest.mark.parametrize("save", [0.1, 0.35, 0.6])
@pytest.mark.parametrize("anneal", [0.0, 0.125, 0.25])
@pytest.mark.parametrize("batch", [None, 5, 7])
def test_the_whole_training_saves_the_share_and_the_steps_are_known(save, anneal, batch):
    policy = fp.InfoBatch(EPOCHS, save=save, anneal=anneal)
    pruner = fp.Pruner(N, policy, batch_size=batch)
    expected = [pruner.step_counts.num_kept(epoch) for epoch in range(EPOCHS)]
    plans = train(pruner)
    numbers = [len(kept) for kept, _ in plans]
    assert numbers == expected
    assert abs(sum(numbers) - (1 - save) * N * EPOCHS) <= (batch or 1) / 2
    if batch is not None:
        assert pruner.total_steps() == sum(-(-number // batch) for number in numbers)
        assert fp.predict_savings(policy, N, batch).samples == sum(numbers)


@given(
    st.lists(st.one_of(st.just(float("nan")), st.floats(0, 10, width=32)), min_size=4, max_size=40),
    st.floats(0.05, 0.9),
    st.integers(0, 9),
)
@settings(deadline=None)
def test_the_missing_samples_are_taken_from_above_the_mean_only_if_needed(losses, save, seed):
    total = len(losses)
    policy = fp.InfoBatch(10, save=0.2, anneal=0.0)
    policy.begin(fp.Training(total))
    policy.load_state_dict({"losses": torch.tensor(losses)})
    number = max(int((1 - save) * total), 1)
    plan = policy.select(3, number, np.random.default_rng(seed))
    known = [np.float64(loss) for loss in losses if loss == loss]
    mean = sum(known) / len(known) if known else 0.0
    below = {sample for sample, loss in enumerate(losses) if loss == loss and loss < mean}
    kept = set(plan.kept.tolist())
    assert len(kept) == number
    weights = torch.ones(total) if plan.weights is None else plan.weights
    of_first, of_second = below - kept, set(range(total)) - below - kept
    assert not of_second or of_first == below
    # Each group that keeps a sample has the weight of the whole group.
    for group in (below, set(range(total)) - below):
        if group & kept:
            assert sum(weights[list(group & kept)].tolist()) == pytest.approx(len(group), rel=1e-5)


# Settings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "expected epochs"),
        ({"epochs": 8, "prune": 1.0}, r"expected prune as a share in \[0, 1\), got 1.0"),
        ({"epochs": 8, "prune": 0.5, "save": 0.3}, "expected either prune or save"),
        ({"epochs": 8, "save": 0.0}, r"expected save as a share in \(0, 1\), got 0.0"),
        ({"epochs": 8, "save": 0.9}, "expected save below 0.875, the share of the epochs"),
        ({"epochs": 8, "anneal": 1.5}, "expected anneal as a share"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        fp.InfoBatch(**arguments)


def test_steps_that_are_too_large_to_save_anything_are_refused():
    with pytest.raises(InputError, match="expected a larger save or a smaller batch_size"):
        fp.Pruner(N, fp.InfoBatch(1, save=0.1, anneal=0.0), batch_size=N)


def test_a_share_that_one_step_per_epoch_exceeds_is_refused():
    with pytest.raises(InputError, match=r"expected save of at most 0\.573 with one step of 5"):
        fp.Pruner(N, fp.InfoBatch(EPOCHS, save=0.6, anneal=0.3), batch_size=5)


def test_the_published_form_has_no_known_number_of_steps():
    pruner = fp.Pruner(N, fp.InfoBatch(EPOCHS), batch_size=BATCH)
    with pytest.raises(InputError, match="known in advance, got 'infobatch'"):
        pruner.total_steps()
