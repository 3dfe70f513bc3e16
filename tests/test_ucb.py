"""UCB: a slow twin written from the paper, and the exact share."""

import pytest
import torch
from resuming import falling_losses, train_pruner

import fineprune as fp
from fineprune.errors import InputError

N, BATCH, EPOCHS = 60, 6, 9


losses_of = falling_losses(N)


def train(pruner, losses=losses_of):
    """Train, and return the kept samples of each epoch."""
    return [kept for kept, _ in train_pruner(pruner, losses, batch=BATCH)[0]]


def twin(numbers, smoothing, exploration, period):
    """The rule, sample by sample: the samples with the highest scores, chosen per period."""
    mean: dict[int, float] = {}
    variance: dict[int, float] = {}
    scores: dict[int, float] = {}
    plans = []
    for epoch in range(EPOCHS):
        if epoch % period == 0:
            scores = {s: mean[s] + exploration * variance[s] for s in mean}
        ranked = sorted(range(N), key=lambda s: -scores.get(s, float("inf")))
        kept = sorted(ranked[: numbers[epoch]])
        for s in kept:
            loss = losses_of(epoch, torch.tensor([s])).item()
            if s not in mean:
                mean[s], variance[s] = loss, 0.0
                continue
            variance[s] = smoothing * variance[s] + (1 - smoothing) * (loss - mean[s]) ** 2
            mean[s] = smoothing * mean[s] + (1 - smoothing) * loss
        plans.append(kept)
    return plans


@pytest.mark.parametrize("save", [0.2, 0.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.8])
@pytest.mark.parametrize("exploration", [0.0, 3.0])
@pytest.mark.parametrize("period", [1, 2, 4])
def test_it_equals_a_twin_written_from_the_paper(save, smoothing, exploration, period):
    policy = fp.UCB(EPOCHS, save, smoothing=smoothing, exploration=exploration, period=period)
    pruner = fp.Pruner(N, policy, seed=1)
    numbers = [pruner.num_kept(epoch) for epoch in range(EPOCHS)]
    plans = train(pruner)
    assert plans == twin(numbers, smoothing, exploration, period)
    assert [len(kept) for kept in plans[:period]] == [N] * period
    for epoch in range(period, EPOCHS - 1):
        if (epoch + 1) % period and numbers[epoch] == numbers[epoch + 1]:
            assert plans[epoch] == plans[epoch + 1]


@pytest.mark.parametrize("anneal", [0.0, 0.2])
def test_the_whole_training_saves_the_share_and_the_steps_are_known(anneal):
    pruner = fp.Pruner(N, fp.UCB(EPOCHS, 0.4, anneal=anneal), batch_size=BATCH)
    numbers = [len(kept) for kept in train(pruner)]
    assert abs(sum(numbers) - 0.6 * N * EPOCHS) <= BATCH / 2
    assert pruner.total_steps() == sum(numbers) // BATCH
    assert numbers[0] == N


def test_a_sample_without_a_finite_loss_is_trained_again():
    def losses(epoch, index):
        return torch.where(index == 7, torch.tensor(torch.inf), losses_of(epoch, index))

    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        plans = train(fp.Pruner(N, fp.UCB(EPOCHS, 0.5)), losses)
    assert all(7 in kept for kept in plans)


def test_huge_losses_have_a_finite_score():
    pruner = fp.Pruner(4, fp.UCB(5, 0.2))
    for epoch in pruner.epochs():
        index = pruner.sampler.order()
        pruner.record(index, torch.full((len(index),), 1e38 if epoch % 2 else -1e38))
    assert torch.isfinite(pruner.state_dict()["learned"]["scores"]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "expected epochs"),
        ({"epochs": 8, "save": 0.0}, r"expected save as a share in \(0, 1\), got 0.0"),
        ({"epochs": 8, "save": 0.9}, "expected save below 0.875, the share of the epochs"),
        ({"epochs": 8, "period": 8}, "epochs that may skip samples, got none of 8"),
        ({"epochs": 8, "period": 0}, "expected period"),
        ({"epochs": 8, "smoothing": 1}, "expected smoothing below 1"),
        ({"epochs": 8, "smoothing": -0.5}, "expected smoothing as a share"),
        ({"epochs": 8, "exploration": -1}, "expected exploration of at least 0, got -1"),
        ({"epochs": 8, "exploration": float("nan")}, "expected exploration of at least 0"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        fp.UCB(**arguments)
