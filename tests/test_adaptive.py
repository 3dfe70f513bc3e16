"""The adaptive policy keeps to its budget exactly, and skips samples whose labels look wrong."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fineprune as fp
from fineprune.errors import InputError
from fineprune.labels.dataset_attributes import labels_of
from fineprune.pruning.policies.step_budget import smooth_weights, steps_of_epoch
from fineprune.pruning.rates import rates_of, relative_rates
from fineprune.pruning.savings import planned_numbers
from fineprune.pruning.step_counts import BatchShape, StepCounts
from fineprune.training.recipe import make_recipe

CHANCE = 2.0
FIRST_BATCH = 10


def milestones(progress):
    return 0.1 * 0.2 ** sum(milestone <= progress for milestone in (3, 6, 8))


def trained(pruner, losses_of, epochs=None):
    """Train some epochs, and return the kept samples of each and the number of batches."""
    kept, batches = [], 0
    for epoch in pruner.epochs():
        order = torch.tensor(list(pruner.sampler))
        kept.append(pruner.plan.kept.tolist())
        for batch in order.split(FIRST_BATCH):
            pruner.record(batch, losses_of(epoch, batch))
            batches += 1
        if epochs is not None and len(kept) == epochs:
            pruner.end_epoch()
            break
    return kept, batches


def first_high_then_low(epoch, index):
    """Losses at chance in the first batch, and below it for all samples but every fifth."""
    return torch.where(index % 5 == 0, CHANCE + 1, CHANCE / 2 if epoch else CHANCE).float()


# The budget


def test_rates_are_relative_to_the_largest_and_a_warm_up_counts_as_the_largest():
    assert relative_rates(rates_of(milestones, 10)) == pytest.approx(
        [1] * 3 + [0.2] * 3 + [0.04] * 2 + [0.008] * 2
    )
    assert relative_rates([1, 2, 4, 2, 1]) == (1, 1, 1, 0.5, 0.25)
    # After the largest rate, a valley counts as what it is.
    assert relative_rates([2, 4, 1, 4, 1]) == (1, 1, 0.25, 1, 0.25)
    assert relative_rates([2, 3.9, 1, 4, 1]) == (1, 0.975, 0.25, 1, 0.25)
    assert relative_rates([3.85, 3.9, 4, 2]) == (1, 1, 1, 0.5)


def planned_of(policy, number, batch):
    return planned_numbers(StepCounts(policy, number, BatchShape(batch)))


def test_equal_epochs_of_a_periodic_schedule_are_equally_long():
    """torch computes each rate from the one before, so that peaks differ by rounding."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    policy = fp.Adaptive(24, 0.35, scheduler)
    numbers = [-(-kept // 32) for kept in planned_of(policy, 3200, 32)]
    assert numbers[4] < numbers[3] < numbers[2] < numbers[1] < numbers[0] == 100
    for epoch in range(8, 24):
        assert abs(numbers[epoch] - numbers[epoch - 8]) <= 1
    assert fp.Adaptive(3).rates == (1, 1, 1)


def test_a_linear_rate_becomes_one_that_falls_as_one_minus_the_square_of_the_steps():
    epochs = 1000
    rates = [1 - (epoch + 0.5) / epochs for epoch in range(epochs)]
    steps = np.cumsum(smooth_weights(relative_rates(rates)))
    np.testing.assert_allclose(
        1 - steps**2, [1 - (n + 1) / epochs for n in range(epochs)], atol=0.01
    )


def test_an_epoch_has_as_many_steps_as_its_rate_has_in_the_shape():
    steps = smooth_weights((1.0, 1.0, 0.5, 0.5, 0.02))
    # The means of the rates are 0.75 and 0.26.
    first, second, third = math.sqrt(0.25), math.sqrt(0.74), 1.0
    expected = [first / 2] * 2 + [(second - first) / 2] * 2 + [third - second]
    assert steps == pytest.approx(expected)


def test_an_epoch_has_no_more_steps_than_one_with_a_larger_rate():
    """There are few values of u at which the rate is almost the largest one."""
    rates = (1.0,) * 5 + tuple(1 - epoch / 20 for epoch in range(1, 20))
    steps = smooth_weights(rates)
    assert steps == tuple(sorted(steps, reverse=True))
    assert steps[0] == steps[5]
    assert smooth_weights((1.0,)) == (1.0,)


def test_epochs_are_shortened_in_proportion_to_rates_that_fall_in_steps():
    policy = fp.Adaptive(10, 0.2, milestones)
    numbers = np.array(planned_of(policy, 100_000, FIRST_BATCH))
    assert (numbers[:6] == 100_000).all()
    assert numbers[6] == pytest.approx(5 * numbers[8], rel=0.01)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12),
    st.integers(1, 40),
    st.floats(0, 0.99),
    st.data(),
)
def test_the_budget_is_used_exactly_whatever_contradicts(rates, full, save, data):
    rates = sorted(rates, reverse=True)
    left = budget = max(round((1 - save) * full * len(rates)), len(rates))
    for epoch in range(len(rates)):
        most = data.draw(st.integers(1, full))
        steps = steps_of_epoch(rates[epoch:], left, most=most, full=full)
        assert 1 <= steps <= full
        left -= steps
    assert left == 0, budget


@pytest.mark.parametrize("save", [0, 0.1, 0.35, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("shape", [{}, {"accumulation": 3}, {"drop_last": True}])
def test_the_number_of_steps_is_known_before_the_start(save, shape):
    samples, epochs = 137, 8
    policy = fp.Adaptive(epochs, save, milestones)
    full = fp.Pruner(samples, fp.FullData(epochs), batch_size=FIRST_BATCH, **shape).total_steps()
    expected = round((1 - save) * full)
    if expected < epochs:
        with pytest.raises(InputError, match=r"at least one step of \d+ samples .* in each of 8"):
            fp.Pruner(samples, policy, batch_size=FIRST_BATCH, **shape)
        return
    pruner = fp.Pruner(samples, policy, batch_size=FIRST_BATCH, **shape)
    assert pruner.total_steps() == expected
    steps = 0
    for epoch in pruner.epochs():
        batches = list(pruner.loader(range(samples)))
        for index, _ in batches:
            pruner.record(index, first_high_then_low(epoch, index))
        steps += math.ceil(len(batches) / shape.get("accumulation", 1))
    assert steps == expected


def test_the_predicted_cost_is_that_of_the_training():
    policy = fp.Adaptive(10, 0.35, milestones)
    savings = fp.predict_savings(policy, 1000, FIRST_BATCH)
    pruner = fp.Pruner(1000, policy, batch_size=FIRST_BATCH)
    kept, batches = trained(pruner, lambda epoch, index: torch.full((len(index),), CHANCE / 2))
    assert savings.steps == batches == 650
    assert savings.samples == sum(map(len, kept)) == 6500
    assert savings.pruned_epochs == sum(len(part) < 1000 for part in kept)


# Samples whose labels look wrong


def watched(pruner, wrong, epochs=None, classes=3):
    """Train a network that takes some samples for another class; return the kept samples."""
    labels = torch.arange(pruner.num_samples) % classes
    kept = []
    for epoch in pruner.epochs():
        kept.append(set(pruner.plan.kept.tolist()))
        for index in pruner.sampler.order().split(FIRST_BATCH):
            other = (labels[index] + 1 + index // classes % (classes - 1)) % classes
            seeming = torch.where(wrong(epoch, index), other, labels[index])
            logits = 4.0 * F.one_hot(seeming, classes)
            losses = F.cross_entropy(logits, labels[index], reduction="none")
            pruner.record(index, losses, logits, labels[index])
        if epoch + 1 == epochs:
            pruner.end_epoch()
            break
    return kept


def every_fifth(epoch, index):
    return index % 5 == 0


WRONG = set(range(0, 1000, 5))


def test_suspicious_samples_are_skipped_from_the_sixth_epoch_on_and_a_tenth_of_them_returns():
    pruner = fp.Pruner(1000, fp.Adaptive(12, 0.16, [1.0] * 10 + [0.001] * 2), batch_size=10)
    kept = watched(pruner, every_fifth)
    numbers = [len(part) for part in kept]
    # The steps that these samples save are used in the last two epochs.
    assert numbers[:10] == [1000] * 5 + [820] * 5
    assert sum(numbers) == 10 * pruner.total_steps() == 10 * round(0.84 * 1200)
    assert [len(WRONG & part) for part in kept[5:10]] == [20] * 5
    assert all(len(WRONG & part) <= 20 for part in kept[10:])
    assert len(set.union(*(WRONG & part for part in kept[5:]))) > 60  # Others each time.
    assert set((pruner.watch.ranking().scores > 0).nonzero().flatten().tolist()) == WRONG


@pytest.mark.parametrize(
    ("settings", "skipped_in"),
    [({"first_epoch": 2}, [2, 3, 4, 5]), ({"threshold": 50.0}, []), ({"returning": 1.0}, [])],
)
def test_the_threshold_and_the_first_epoch_decide(settings, skipped_in):
    pruner = fp.Pruner(1000, fp.Adaptive(6, 0.0, [1.0] * 6, **settings), batch_size=10)
    kept = watched(pruner, every_fifth)
    # With save=0 all steps are used, so that the samples are trained all the same.
    assert [len(part) for part in kept] == [1000] * 6
    policy: Any = pruner.policy
    assert [e for e in range(6) if len(vars(policy)["_scores"]) and len(policy._skipped(e))] == (
        skipped_in or ([] if "threshold" in settings else [5])
    )


def test_a_sample_that_no_longer_looks_wrong_is_trained_again():
    pruner = fp.Pruner(1000, fp.Adaptive(40, 0.3, [1] * 40, returning=1.0), batch_size=10)
    watched(pruner, lambda epoch, index: (index % 5 == 0) & (epoch < 6))
    assert pruner.plan.number == 700
    assert pruner.watch.ranking().num_suspects == 0


def test_a_shortened_epoch_has_no_larger_share_of_the_returning_samples():
    """The last epochs are the shortest; too many suspicious samples there undo the skipping."""
    rates = [1.0] * 10 + [0.5] * 4 + [0.1] * 4
    pruner = fp.Pruner(1000, fp.Adaptive(18, 0.35, rates=rates), batch_size=10)
    kept = watched(pruner, every_fifth)[10:]
    assert 100 <= min(map(len, kept)) < max(map(len, kept)) < 700
    returned = [len(WRONG & part) for part in kept]
    # Of the 200 suspicious samples, 20 return in an epoch with all 800 others.
    assert returned == [round(20 * len(part) / 820) for part in kept]
    assert min(returned) < 5


def test_without_logits_it_says_once_that_no_label_is_looked_at():
    pruner = fp.Pruner(1000, fp.Adaptive(12, 0.35, [1] * 12), batch_size=10)
    with pytest.warns(RuntimeWarning, match="Adaptive has seen no logits") as said:
        trained(pruner, first_high_then_low)
    assert len(said) == 1


class Targets(list[int]):
    """A data set with an attribute that may be the class of each sample."""

    targets: Any
    target_transform: Any

    def __init__(self, targets, target_transform=None):
        super().__init__(range(200))
        self.targets, self.target_transform = targets, target_transform


def random_states():
    """Return the states of the three global generators, as texts that can be compared."""
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    return [str(state) for state in (torch.get_rng_state().tolist(), of_numpy, random.getstate())]


@pytest.mark.parametrize(
    ("data", "taken"),
    [
        (Targets([0, 1] * 100), True),
        (Targets([0, 1] * 100, lambda label: 1 - label), True),
        (Targets([0, 1] * 100, lambda label: int(torch.randint(10, ()))), False),
        (Targets([0, 1] * 100, lambda label: random.randrange(10)), False),
        (Targets([0, 1] * 100, lambda label: int(np.random.randint(10))), False),  # noqa: NPY002
        (Targets(torch.zeros(200, 4, 4, dtype=torch.int64)), False),
        (Targets(["a", "b"] * 100), False),
        (Targets([0.5, 1.0] * 100), False),
        (Targets([0, 1]), False),
    ],
)
def test_only_what_is_the_class_of_each_sample_is_taken_from_a_data_set(data, taken):
    before = random_states()
    assert (labels_of(data) is not None) == taken
    assert random_states() == before


# The choice of samples


def test_no_sample_is_repeated_before_all_were_chosen():
    pruner = fp.Pruner(100, fp.Adaptive(8, 0.6, [1] * 8), batch_size=FIRST_BATCH)
    kept, _ = trained(pruner, first_high_then_low)
    assert [len(part) for part in kept] == [40] * 8
    first, second, third, fourth, fifth = map(set, kept[:5])
    assert not first & second
    assert len(first | second | third) == 100
    assert len((third | fourth | fifth) - (first | second)) >= 20


# Settings


def test_a_recipe_gives_the_policy_its_learning_rates():
    training = {"epochs": 10, "milestones": [3, 6, 8], "gamma": 0.2}
    recipe = make_recipe({"training": training, "pruning": {"policy": "adaptive", "save": 0.2}})
    policy = recipe.policy()
    assert isinstance(policy, fp.Adaptive)
    assert policy.save == 0.2
    assert policy.rates == pytest.approx(relative_rates(rates_of(milestones, 10)))
