"""ProgressiveDropout: slow twins of its three forms, written from the paper."""

import math

import pytest
import torch
from resuming import falling_losses, train_pruner

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.random_streams import stream

N, BATCH, EPOCHS = 60, 6, 8


losses_of = falling_losses(N)


def rescored_losses(epoch, index):
    return losses_of(epoch + 1000, index) * 300


def train(pruner):
    """Train and rescore, and return the kept samples of each epoch."""
    plans, _ = train_pruner(pruner, losses_of, rescored=rescored_losses, batch=BATCH)
    return [kept for kept, _ in plans]


def twin(form, threshold, decay, seed):
    """The rule, sample by sample. The last epoch trains all samples."""
    right = dict.fromkeys(range(N), 0.0)  # The probability of the right class.
    plans = []
    for epoch in range(EPOCHS):
        hard = [s for s in range(N) if right[s] < threshold]
        rng = stream(seed, epoch, "select")
        if epoch == EPOCHS - 1:
            kept = list(range(N))
        elif form == "difficulty":
            kept = hard or [min(right, key=lambda s: right[s])]
        else:
            scalar = math.ceil(N * decay**epoch)
            number = scalar if form == "scalar" else max(len(hard), 1)
            everything = number == N
            kept = (
                list(range(N))
                if everything
                else sorted(rng.choice(N, number, replace=False, shuffle=False).tolist())
            )
        for s in range(N):
            source = losses_of if s in kept else rescored_losses
            right[s] = math.exp(-source(epoch, torch.tensor([s])).item())
        plans.append(kept)
    return plans


@pytest.mark.parametrize("form", ["difficulty", "scalar", "schedule-matched"])
@pytest.mark.parametrize(("threshold", "decay"), [(0.3, 0.95), (0.7, 0.5), (0.0001, 0.9)])
def test_it_equals_a_twin_written_from_the_paper(form, threshold, decay):
    policy = fp.ProgressiveDropout(EPOCHS, form, threshold=threshold, decay=decay)
    plans = train(fp.Pruner(N, policy, seed=5))
    assert plans == twin(form, threshold, decay, 5)
    assert min(len(kept) for kept in plans) < N


def test_the_scalar_form_needs_no_losses_and_knows_its_steps():
    policy = fp.ProgressiveDropout(EPOCHS, "scalar", decay=0.7)
    pruner = fp.Pruner(N, policy, batch_size=BATCH)
    assert not policy.needs_losses
    assert not policy.rescores
    plans = train(pruner)
    numbers = [len(kept) for kept in plans]
    assert numbers == [60, 42, 30, 24, 18, 12, 12, 60]
    assert pruner.total_steps() == sum(numbers) // BATCH
    assert pruner.policy.state_dict()["losses"].numel() == 0
    assert fp.predict_savings(policy, N, BATCH).samples == sum(numbers)


def test_a_number_that_whole_steps_round_up_to_all_samples_is_no_error():
    pruner = fp.Pruner(N, fp.ProgressiveDropout(3, "scalar", decay=0.999), batch_size=32)
    assert [pruner.num_kept(epoch) for epoch in range(3)] == [N, N, N]


@pytest.mark.parametrize("form", ["difficulty", "schedule-matched"])
def test_shortened_epochs_have_whole_steps(form):
    policy = fp.ProgressiveDropout(EPOCHS, form, threshold=0.5)
    plans = train(fp.Pruner(N, policy, batch_size=BATCH))
    numbers = [len(kept) for kept in plans]
    assert min(numbers) < N
    assert all(number % BATCH == 0 and number for number in numbers)


def test_the_last_epoch_trains_all_samples_unless_told_otherwise():
    assert fp.ProgressiveDropout(1).anneals(0)
    policy = fp.ProgressiveDropout(EPOCHS)
    assert [policy.anneals(epoch) for epoch in range(EPOCHS)] == [False] * 7 + [True]
    assert not fp.ProgressiveDropout(EPOCHS, anneal=0.0).anneals(EPOCHS - 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "expected epochs"),
        ({"epochs": "8"}, "expected epochs"),
        ({"epochs": 8, "form": "easy"}, "expected form as one of difficulty, scalar, schedule-m"),
        ({"epochs": 8, "threshold": 0.0}, r"expected threshold as a share in \(0, 1\]"),
        ({"epochs": 8, "decay": 1.0}, r"expected decay as a share in \(0, 1\), got 1.0"),
        ({"epochs": 8, "anneal": 2.0}, "expected anneal as a share"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        fp.ProgressiveDropout(**arguments)
