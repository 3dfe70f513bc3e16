"""InfoBatch: a slow twin written from the paper, and exact shares."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resuming import assert_plans, falling_losses, train_pruner

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
    assert_plans(plans, twin(4, prune, anneal))


def test_samples_without_a_finite_loss_are_always_kept():
    def losses(epoch, index):
        return torch.where(index % 2 == 0, torch.tensor(torch.nan), losses_of(epoch, index))

    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        plans = train(fp.Pruner(N, fp.InfoBatch(EPOCHS, 0.9)), losses)
    assert all(set(range(0, N, 2)) <= set(kept) for kept, _ in plans)
    assert len(plans[1][0]) < N


# The form with an exact share


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
