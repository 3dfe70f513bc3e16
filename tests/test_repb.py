"""RePB: a slow twin written from the rule, exact shares, and what the first epochs teach."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from resuming import assert_plans, falling_losses, train_pruner

import fineprune as fp
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
    assert_plans(plans[1:], twin(batches, numbers, 4))


def after_one_epoch(losses, batch, **options):
    """Return a pruner of four epochs in the second one, and the losses' samples in order."""
    pruner = fp.Pruner(len(losses), fp.RePB(4, **options), batch_size=batch)
    pruner.start_epoch(0)
    for index in torch.arange(len(losses)).split(batch):
        pruner.record(index, torch.tensor(losses)[index])
    pruner.end_epoch()
    pruner.start_epoch(1)
    return pruner


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


@pytest.mark.parametrize(
    ("reached", "kept", "drawn"), [(10, 25, slice(10, 40)), (30, 15, slice(30))]
)
def test_samples_are_drawn_with_the_same_probability(reached, kept, drawn):
    """Others than those that reached the mean; or some of these, if they are too many."""
    policy = policy_with([True] * reached + [False] * (40 - reached), [5] * 40)
    draws = [policy.select(9, kept, np.random.default_rng(seed)).kept for seed in range(2000)]
    counts = torch.bincount(torch.cat(draws), minlength=40)
    assert (counts[:10] == 2000).all() or (counts[30:] == 0).all()
    # Each is kept with probability a half, with a deviation of 22 in 2,000 draws.
    assert (counts[drawn] - 1000).abs().max() < 5 * 22.4
