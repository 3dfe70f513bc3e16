"""RePB: a slow twin written from the rule, exact shares, and what the first epochs teach."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from resuming import falling_losses, stopped_and_resumed, train_pruner

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.random_streams import stream

N, BATCH, EPOCHS = 60, 5, 8

falling = falling_losses(N)


def trained(pruner, losses_of=falling):
    """Train, and return the plan of each epoch and its batches: lists of (sample, loss)."""
    batches: list[list[list[tuple[int, float]]]] = [[] for _ in range(EPOCHS)]

    def recorded(epoch, index):
        losses = losses_of(epoch, index)
        batches[epoch].append(list(zip(index.tolist(), losses.tolist(), strict=True)))
        return losses

    return train_pruner(pruner, recorded)[0], batches


def twin(batches, numbers, seed):
    """The rule, sample by sample: the kept samples with their weights, from the second epoch on."""
    times_trained = [0] * N
    for epoch, number in enumerate(numbers[1:], start=1):
        reached = set()
        for batch in batches[epoch - 1]:
            finite = [Fraction(loss) for _, loss in batch if math.isfinite(loss)]
            for sample, loss in batch:
                if math.isfinite(loss) and loss >= sum(finite) / len(finite):
                    reached.add(sample)
        for sample in {sample for batch in batches[epoch - 1] for sample, _ in batch}:
            times_trained[sample] += 1
        if number == N:  # All samples, as in annealed epochs.
            yield dict.fromkeys(range(N), 1.0)
            continue
        others = [sample for sample in range(N) if sample not in reached]
        rng = stream(seed, epoch, "select")
        of_reached = min(number, len(reached))
        kept = rng.choice(sorted(reached), of_reached, replace=False, shuffle=False).tolist()
        kept += rng.choice(others, number - of_reached, replace=False, shuffle=False).tolist()
        yield {sample: epoch / times_trained[sample] for sample in kept}


@pytest.mark.parametrize("save", [0.1, 0.35, 0.5])
@pytest.mark.parametrize("anneal", [0.0, 0.25])
@pytest.mark.parametrize("batch", [4, 5, 7])
def test_the_plans_equal_those_of_a_twin(save, anneal, batch):
    pruner = fp.Pruner(N, fp.RePB(EPOCHS, save, anneal=anneal), batch_size=batch, seed=4)
    numbers = [pruner.step_counts.num_kept(epoch) for epoch in range(EPOCHS)]
    plans, batches = trained(pruner)
    assert plans[0] == (list(range(N)), None)
    for (kept, weights), expected in zip(plans[1:], twin(batches, numbers, 4), strict=True):
        assert kept == sorted(expected)
        assert (weights or [1.0] * N) == pytest.approx([expected[sample] for sample in kept])


@pytest.mark.parametrize("save", [0.1, 0.35, 0.6])
@pytest.mark.parametrize("batch", [None, 5, 7])
def test_the_whole_training_saves_the_share_and_the_steps_are_known(save, batch):
    policy = fp.RePB(EPOCHS, save, anneal=0.125)
    pruner = fp.Pruner(N, policy, batch_size=batch)
    expected = [pruner.step_counts.num_kept(epoch) for epoch in range(EPOCHS)]
    numbers = [len(kept) for kept, _ in trained(pruner)[0]]
    assert numbers == expected
    assert numbers[0] == numbers[-1] == N
    assert abs(sum(numbers) - (1 - save) * N * EPOCHS) <= (batch or 1) / 2
    if batch is not None:
        assert pruner.total_steps() == sum(-(-number // batch) for number in numbers)
        assert fp.predict_savings(policy, N, batch).samples == sum(numbers)


def after_one_epoch(losses, batch, **options):
    """Return a pruner of four epochs in the second one, and the losses' samples in order."""
    pruner = fp.Pruner(len(losses), fp.RePB(4, **options), batch_size=batch)
    pruner.start_epoch(0)
    for index in torch.arange(len(losses)).split(batch):
        pruner.record(index, torch.tensor(losses)[index])
    pruner.end_epoch()
    pruner.start_epoch(1)
    return pruner


def test_losses_are_compared_within_their_batch_only():
    # Most losses of the first batch exceed all of the second one, which is of a later network.
    pruner = after_one_epoch([9.0, 8.0, 1.0, 1.0, 0.4, 0.1, 0.1, 0.3], 4, save=0.375)
    assert pruner.plan.kept.tolist() == [0, 1, 4, 7]


def test_a_loss_that_equals_the_mean_has_reached_it():
    pruner = after_one_epoch([1.0, 1.0, 5.0, 0.0], 2, save=0.1875)
    assert {0, 1, 2} <= set(pruner.plan.kept.tolist()) or pruner.plan.number < 3
    assert pruner.policy.state_dict()["reached"].tolist() == [0b11100000]


def test_a_loss_that_is_not_finite_has_not_reached_the_mean():
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        pruner = after_one_epoch([math.nan, 1.0, 0.5, math.inf, 2.0, 0.0], 3, save=0.1)
    assert pruner.policy.state_dict()["reached"].tolist() == [0b01001000]


def test_a_sample_in_two_batches_is_kept_if_it_reached_the_mean_of_one():
    pruner = fp.Pruner(3, fp.RePB(4))
    for losses in ([1.0, 2.0], [2.0, 1.0]):
        pruner.record([0, 1], torch.tensor(losses))
    pruner.end_epoch()
    state = pruner.policy.state_dict()
    assert state["reached"].tolist() == [0b11000000]
    assert state["trained"].tolist() == [1, 1, 0]


def policy_with(reached, trained, **options):
    """A policy that knows which samples reached the mean, and how often each was trained."""
    policy = fp.RePB(40, **options)
    policy.begin(fp.Training(len(reached)))
    policy.load_state_dict(
        {
            "reached": torch.from_numpy(np.packbits(np.array(reached, dtype=np.bool_))),
            "trained": torch.tensor(trained, dtype=torch.uint8),
        }
    )
    return policy


def test_all_others_come_back_with_the_same_probability():
    policy = policy_with([True] * 10 + [False] * 30, [5] * 40)
    draws = [policy.select(9, 25, np.random.default_rng(seed)).kept for seed in range(2000)]
    counts = torch.bincount(torch.cat(draws), minlength=40)
    assert (counts[:10] == 2000).all()
    # Each of the others is kept with probability a half, with a deviation of 22 in 2,000 draws.
    assert (counts[10:] - 1000).abs().max() < 5 * 22.4


def test_of_too_many_samples_that_reached_the_mean_random_ones_are_kept():
    policy = policy_with([True] * 30 + [False] * 10, [5] * 40)
    draws = [policy.select(9, 15, np.random.default_rng(seed)).kept for seed in range(2000)]
    counts = torch.bincount(torch.cat(draws), minlength=40)
    assert (counts[30:] == 0).all()
    assert (counts[:30] - 1000).abs().max() < 5 * 22.4


def test_the_weight_is_the_number_of_epochs_for_each_that_trained_the_sample():
    policy = policy_with([False] * 4, [6, 3, 1, 0])
    weights = policy.select(6, 2, np.random.default_rng(0)).weights
    assert weights is not None
    assert weights.dtype == torch.float32
    assert weights.tolist() == [1.0, 2.0, 6.0, 6.0]


def test_without_rescaling_there_are_no_weights():
    plain, weighted = (
        trained(fp.Pruner(N, fp.RePB(EPOCHS, rescale=on), batch_size=BATCH))[0]
        for on in (False, True)
    )
    assert all(weights is None for _, weights in plain)
    assert [kept for kept, _ in plain] == [kept for kept, _ in weighted]
    later = [np.mean(weights) for _, weights in weighted if weights is not None]
    assert len(later) == EPOCHS - 1
    assert all(mean > 1 for mean in later[1:])


@pytest.mark.parametrize("stop", [(1, 0), (4, 0), (4, 3), (6, 5)])
def test_a_stopped_training_continues_exactly(stop, tmp_path):
    made = partial(fp.Pruner, N, fp.RePB(EPOCHS, 0.4), batch_size=BATCH, seed=2)
    train = partial(train_pruner, losses_of=falling)
    whole, _ = train(made())
    assert stopped_and_resumed(made, train, stop, tmp_path) == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "expected epochs to be a whole number of at least 1, got 0"),
        ({"epochs": 8, "save": 1.0}, r"expected save as a share in \(0, 1\), got 1.0"),
        ({"epochs": 8, "save": 0.9}, r"expected save below 0\.875, .* got 0\.9: save less, or let"),
        ({"epochs": 8, "save": 0.8, "anneal": 0.125}, r"expected save below 0\.75"),
        ({"epochs": 1}, "expected epochs that may skip samples, got none of 1: train more"),
        ({"epochs": 8, "rescale": 2}, "expected rescale as True or False, got 2"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(InputError, match=message) as raised:
        fp.RePB(**arguments)
    assert "\n" not in str(raised.value)
