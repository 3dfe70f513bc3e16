"""The adaptive policy keeps to its budget exactly, and skips samples that contradict the others."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.learning_rates import rates_of_epochs, relative_rates
from fineprune.pruning.savings import planned_numbers
from fineprune.pruning.step_budget import smooth_weights, steps_of_epoch
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
    assert relative_rates(rates_of_epochs(milestones, 10)) == pytest.approx(
        [1] * 3 + [0.2] * 3 + [0.04] * 2 + [0.008] * 2
    )
    assert relative_rates([1, 2, 4, 2, 1]) == (1, 1, 1, 0.5, 0.25)
    # After the largest rate, a valley counts as what it is.
    assert relative_rates([2, 4, 1, 4, 1]) == (1, 1, 0.25, 1, 0.25)
    assert relative_rates([2, 3.9, 1, 4, 1]) == (1, 0.975, 0.25, 1, 0.25)
    assert relative_rates([3.85, 3.9, 4, 2]) == (1, 1, 1, 0.5)


def test_equal_epochs_of_a_periodic_schedule_are_equally_long():
    """torch computes each rate from the one before, so that peaks differ by rounding."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    policy = fp.Adaptive(24, 0.35, scheduler, patience=0)
    pruner = fp.Pruner(3200, policy, batch_size=32)
    numbers = [-(-kept // 32) for kept in pruner.policy.planned_numbers()]
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
    StepCounts(policy, 100_000, BatchShape(FIRST_BATCH, 1, 1, False)).bind()
    numbers = np.array(policy.planned_numbers())
    assert (numbers[:6] == 100_000).all()
    assert numbers[6] == pytest.approx(5 * numbers[8], rel=0.01)


@pytest.mark.parametrize("options", [{}, {"patience": 0}, {"anneal": 0.2}])
def test_the_planned_numbers_are_those_of_a_training_in_which_no_sample_contradicts(options):
    def policy():
        return fp.Adaptive(10, save=0.35, rates=milestones, **options)

    pruner = fp.Pruner(203, policy(), batch_size=FIRST_BATCH)
    kept, _ = trained(pruner, lambda epoch, index: torch.full((len(index),), CHANCE))
    counts = StepCounts(policy(), 203, BatchShape(FIRST_BATCH, 1, 1, False))
    counts.bind()
    assert planned_numbers(counts) == [len(samples) for samples in kept]


@pytest.mark.parametrize("rates", [[1, 2], [0, 0, 0], [1, -1, 1], [1, math.nan, 1]])
def test_wrong_rates_are_refused(rates):
    with pytest.raises(InputError, match=r"expected (one )?learning rate"):
        rates_of_epochs(rates, 3)


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


def test_epochs_with_small_rates_are_shortened_first():
    pruner = fp.Pruner(1000, fp.Adaptive(10, 0.35, milestones, patience=0), batch_size=FIRST_BATCH)
    kept, _ = trained(pruner, first_high_then_low)
    numbers = [len(part) for part in kept]
    assert numbers[:6] == [1000] * 6
    assert 200 <= numbers[7] <= 210
    assert numbers[6:] == sorted(numbers[6:], reverse=True)


@pytest.mark.parametrize("save", [0, 0.1, 0.35, 0.5, 0.9, 0.99])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"accumulation": 3},
        {"drop_last": True},
        {"num_replicas": 2, "rank": 1, "all_gather": lambda array: [array, array]},
    ],
)
def test_the_number_of_steps_is_known_before_the_start(save, shape):
    samples, epochs = 137, 8
    policy = fp.Adaptive(epochs, save, milestones)
    full = fp.Pruner(samples, fp.FullData(epochs), batch_size=FIRST_BATCH, **shape).total_steps()
    expected = round((1 - save) * full)
    if expected < epochs:
        with pytest.raises(InputError, match=r"expected save of at most 0\.\d+ with one step"):
            fp.Pruner(samples, policy, batch_size=FIRST_BATCH, **shape)
        return
    pruner = fp.Pruner(samples, policy, batch_size=FIRST_BATCH, **shape)
    assert pruner.total_steps() == expected
    steps = 0
    for epoch in pruner.epochs():
        own = torch.tensor(list(pruner.sampler))
        batches = [
            batch
            for batch in own.split(FIRST_BATCH)
            if len(batch) == FIRST_BATCH or not shape.get("drop_last")
        ]
        for batch in batches:
            pruner.record(batch, first_high_then_low(epoch, batch))
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


# Samples that contradict the others


def test_samples_above_chance_in_five_epochs_are_skipped_and_a_tenth_of_them_returns():
    policy = fp.Adaptive(12, 0.16, [1.0] * 10 + [0.001] * 2)
    pruner = fp.Pruner(1000, policy, batch_size=FIRST_BATCH)
    kept, batches = trained(pruner, first_high_then_low)
    wrong = set(range(0, 1000, 5))
    numbers = [len(part) for part in kept]
    # The steps that these samples save are used in the last two epochs.
    assert numbers[:10] == [1000] * 5 + [820] * 5
    assert sum(numbers[10:]) == 10 * batches - 5000 - 5 * 820
    assert [len(wrong & set(part)) for part in kept[5:10]] == [20] * 5
    assert all(len(wrong & set(part)) <= 20 for part in kept[10:])
    assert pruner.counts is not None
    assert (pruner.counts[::5] >= 5).all()
    assert not pruner.counts[1::5].any()


def test_epochs_in_which_hardly_anything_was_learned_say_nothing_about_single_samples():
    """Else, whole classes that are not learned yet would contradict the others."""

    def late(epoch, index):
        losses = first_high_then_low(epoch, index)
        hardly = torch.where(losses > CHANCE, CHANCE + 1, 0.95 * CHANCE)
        return hardly if 0 < epoch < 4 else losses

    policy = fp.Adaptive(12, 0.15, [1.0] * 10 + [0.001] * 2, chance=CHANCE)
    pruner = fp.Pruner(1000, policy, batch_size=FIRST_BATCH)
    kept, _ = trained(pruner, late)
    # The epochs 4 to 8 count. In epoch 0, no loss is below chance.
    assert [len(part) for part in kept[:10]] == [1000] * 9 + [820]


@pytest.mark.parametrize(("learned", "skipped"), [(0.3, 360), (1.2, 180)])
def test_losses_above_chance_on_average_contradict_once_most_samples_are_learned(learned, skipped):
    def wavering(epoch, index):
        """A fifth is always above chance, a fifth in every other epoch and on average."""
        sometimes = torch.where(torch.tensor(epoch % 2 == 0), 1.75, 0.75) * CHANCE
        losses = torch.where(index % 5 == 1, sometimes, learned)
        return torch.where(index % 5 == 0, CHANCE + 1, losses).float()

    policy = fp.Adaptive(12, 0.3, [1.0] * 8 + [0.001] * 4, chance=CHANCE)
    pruner = fp.Pruner(1000, policy, batch_size=FIRST_BATCH)
    kept, _ = trained(pruner, wavering, epochs=6)
    assert [len(part) for part in kept] == [1000] * 5 + [1000 - skipped]
    assert pruner.policy.num_suspects() == skipped / 0.9


def test_few_contradicting_samples_are_not_evidence_of_wrong_labels():
    """With correct labels, some samples are hard; skipping them would make the network worse."""
    kept, counts = {}, {}
    for evidence in (0.2, 0.21):
        policy = fp.Adaptive(8, 0.1, [1.0] * 7 + [0.001], evidence=evidence)
        pruner = fp.Pruner(1000, policy, batch_size=FIRST_BATCH)
        kept[evidence] = [len(part) for part in trained(pruner, first_high_then_low)[0]]
        counts[evidence] = pruner.counts
    assert kept[0.2][:7] == [1000] * 5 + [820] * 2
    assert kept[0.21][:7] == [1000] * 7
    assert counts[0.21] is not None
    assert (counts[0.21][::5] >= 7).all()


def watched(
    labels, contradicting, epochs, with_logits=True, consistent=False, earlier=None, known=None
):
    """Train a network that takes some samples for another class, and return the pruner."""
    policy = fp.Adaptive(12, 0, [1] * 12, earlier=earlier)
    data = len(labels) if known is None else TensorDataset(labels, known)
    pruner = fp.Pruner(data, policy, batch_size=FIRST_BATCH)
    for epoch in pruner.epochs():
        for index in pruner.sampler.order().split(FIRST_BATCH):
            # Evenly for the other two, which is no consistent mistake, or for one of them.
            second = 0 if consistent else (index // 10 + epoch) % 2
            other = (labels[index] + 1 + second) % 3
            seeming = torch.where(contradicting[index], other, labels[index])
            logits = F.one_hot(seeming, 3) * (4.0 if epoch else 0.0)
            losses = F.cross_entropy(logits, labels[index], reduction="none")
            pruner.record(index, losses, *((logits, labels[index]) if with_logits else ()))
        if epoch == epochs - 1:
            pruner.end_epoch()
            break
    return pruner


def test_a_class_that_is_not_learned_is_not_skipped_if_labels_are_known():
    """A small class looks like wrong labels as long as predicting the large one costs less."""
    labels = torch.arange(200) % 2
    labels[::5] = 2
    unlearned = labels == 2
    assert watched(labels, unlearned, 8, with_logits=False).policy.num_suspects() == 40
    pruner = watched(labels, unlearned, 8)
    assert pruner.policy.num_suspects() == 0
    resumed = fp.Pruner(200, fp.Adaptive(12, 0, [1] * 12), batch_size=FIRST_BATCH)
    resumed.load_state_dict(pruner.state_dict())
    assert resumed.policy.num_suspects() == 0
    # The data set may say the labels, in any numbers; without a label, a sample is in no class.
    # If each sample has a label of its own, no class is known.
    every = torch.arange(200)
    for known, number in (
        (labels * 1000 - 999, 0),
        (labels * 2, 0),
        (labels * 0 - 1, 40),
        (every, 40),
    ):
        alone = watched(labels, unlearned, 8, with_logits=False, known=known)
        assert alone.policy.num_suspects() == number
    # It may look consistently confused, and as many samples of the other classes may be wrong.
    assert watched(labels, unlearned, 8, consistent=True).policy.num_suspects() == 0
    many = unlearned | (torch.arange(200) % 5 == 1) | (torch.arange(200) % 5 == 2)
    assert watched(labels, many, 8).policy.num_suspects() == 80
    # Suspects of an earlier training are skipped, and the others of their class are not.
    some = unlearned & (torch.arange(200) % 20 == 0)
    earlier = fp.LabelWatch(200, 3)
    for _ in range(10):
        seeming = torch.where(some, torch.arange(200) // 20 % 2, labels)
        earlier.record(torch.arange(200), 4.0 * F.one_hot(seeming, 3), labels)
    found = earlier.ranking().scores > 0
    assert torch.equal(found, some)
    assert watched(labels, unlearned, 8, earlier=earlier).policy.num_suspects() == 10
    # Half of a class may be wrong.
    half = torch.where(unlearned, torch.arange(200) % 10 == 0, torch.arange(200) % 7 == 0)
    assert watched(labels, half, 8).policy.num_suspects() == 20 + 23


@pytest.mark.parametrize(
    "form",
    [
        lambda labels: labels[::-1].copy()[::-1],
        lambda labels: labels.astype(">i4"),
        lambda labels: labels.astype(np.uint64) + 2**63,
        torch.from_numpy,
        list,
    ],
)
def test_labels_are_taken_in_any_form(form):
    labels = np.arange(200) % 3
    pruner = fp.Pruner(200, fp.Adaptive(4), labels=form(labels))
    assert vars(pruner.policy)["_labels"].unique().tolist() == [0, 1, 2]


class Targets(Dataset[int]):
    """A data set with an attribute that may be the class of each sample."""

    def __init__(self, targets, target_transform=None):
        self.targets = targets
        self.target_transform = target_transform

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return index


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
    found = vars(fp.Pruner(data, fp.Adaptive(4)).policy)["_labels"]
    assert (found is not None) == taken
    assert random_states() == before


@pytest.mark.parametrize("given", [{}, {"labels": [1, 0] * 100}])
def test_a_state_of_a_training_with_other_labels_says_so(given):
    labels = [0, 1] * 100
    state = fp.Pruner(Targets(labels), fp.Adaptive(4)).state_dict()
    with pytest.warns(RuntimeWarning, match="the labels are others than in the training"):
        fp.Pruner(Targets(labels[::-1]), fp.Adaptive(4), **given).load_state_dict(state)
    without = {name: value for name, value in state.items() if name != "labels"}
    for data, known in (
        (Targets(np.array(labels)), state),
        (200, state),
        (Targets(labels[::-1]), without),  # A state of an earlier version.
        (Targets(labels[::-1]), fp.Pruner(200, fp.Adaptive(4)).state_dict()),
    ):
        fp.Pruner(data, fp.Adaptive(4)).load_state_dict(known)


def test_one_loss_below_chance_clears_a_sample():
    def relenting(epoch, index):
        losses = first_high_then_low(epoch, index)
        return torch.where(torch.tensor(epoch >= 7), CHANCE / 2, losses)

    pruner = fp.Pruner(
        1000, fp.Adaptive(12, 0.1, rates=[1] * 12, returning=1.0), batch_size=FIRST_BATCH
    )
    trained(pruner, relenting)
    assert not pruner.counts.any()


def test_a_shortened_epoch_has_no_larger_share_of_the_returning_samples():
    """The last epochs are the shortest; too many contradicting samples there undo the skipping."""
    rates = [1.0] * 10 + [0.5] * 4 + [0.1] * 4
    pruner = fp.Pruner(1000, fp.Adaptive(18, 0.35, rates=rates), batch_size=FIRST_BATCH)
    kept = trained(pruner, first_high_then_low)[0][10:]
    assert 100 <= min(map(len, kept)) < max(map(len, kept)) < 600
    returned = [sum(sample % 5 == 0 for sample in part) for part in kept]
    # Of the 200 contradicting samples, 20 return in an epoch with all 800 others.
    assert returned == [round(20 * len(part) / 820) for part in kept]
    assert min(returned) < 5


def test_contradicting_samples_fill_a_budget_that_the_others_cannot_use():
    pruner = fp.Pruner(1000, fp.Adaptive(12, 0.0), batch_size=FIRST_BATCH)
    kept, batches = trained(pruner, first_high_then_low)
    assert batches == 1200
    assert all(len(part) == 1000 for part in kept)


def test_chance_is_the_mean_of_the_first_batch_unless_it_is_given():
    for policy, expected in ((fp.Adaptive(1, 0), CHANCE), (fp.Adaptive(1, 0, chance=3.5), 3.5)):
        pruner = fp.Pruner(20, policy, batch_size=FIRST_BATCH)
        for _ in pruner.epochs():
            pruner.record(torch.arange(10), torch.full((10,), CHANCE))
            pruner.record(torch.arange(10, 20), torch.full((10,), 9.0))
        assert pruner.policy.state_dict()["chance"] == expected


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "expected epochs"),
        ({"epochs": 5, "save": 1.0}, r"expected save as a share in \[0, 1\), got 1.0"),
        ({"epochs": 5, "patience": -1}, "expected patience"),
        ({"epochs": 5, "patience": 300}, "expected patience of at most 255, got 300"),
        ({"epochs": 5, "returning": 1.5}, "expected returning"),
        ({"epochs": 5, "chance": 0.0}, "expected chance"),
        ({"epochs": 5, "suspects_after": 0}, "expected suspects_after"),
        ({"epochs": 5, "suspects_after": 5}, "expected suspects_after below the 5 epochs"),
        ({"epochs": 5, "suspects_after": 2, "patience": 0}, "expected patience of at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        fp.Adaptive(**settings)


def test_a_recipe_gives_the_policy_its_learning_rates():
    training = {"epochs": 10, "milestones": [3, 6, 8], "gamma": 0.2}
    recipe = make_recipe({"training": training, "pruning": {"policy": "adaptive", "save": 0.2}})
    policy = recipe.policy()
    assert isinstance(policy, fp.Adaptive)
    assert policy.save == 0.2
    assert policy.rates == pytest.approx(relative_rates(rates_of_epochs(milestones, 10)))


def test_a_recipe_with_a_schedule_can_be_trained_with_the_policy():
    recipe = make_recipe({"pruning": {"policy": "fine-pruning", "window": 3}})
    assert recipe.replaced("pruning", policy="adaptive").policy().name == "adaptive"
