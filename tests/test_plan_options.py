"""The options that every policy takes: anneal, rescale, keep_per_class and max_skips."""

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resuming import stopped_and_resumed, train_pruner

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.plan_options import AppliedOptions
from fineprune.pruning.policies.matched import Matched

N, BATCH, EPOCHS, CLASSES = 120, 5, 12, 6
LABELS = [sample % CLASSES if sample % 3 else 0 for sample in range(N)]


def schedule():
    return fp.Schedule(EPOCHS, window=EPOCHS, start=1)


class SkipsTheFirst(fp.Policy):
    """A user's own policy, which never calls the constructor of Policy and always skips 40."""

    name = "skips-the-first"

    def __init__(self, epochs, **options):
        self._epochs = epochs
        if options:
            self.plan_options = fp.PlanOptions(**options)

    @property
    def epochs(self):
        return self._epochs

    def num_kept(self, epoch):
        return N - 40

    def select(self, epoch, num_kept, rng):
        return fp.EpochPlan(epoch, torch.arange(N - num_kept, N))


POLICIES = {
    "fine-pruning": lambda **options: fp.FinePruning(schedule(), 0.3, **options),
    "random": lambda **options: fp.RandomPruning(schedule(), 0.3, **options),
    "adaptive": lambda **options: fp.Adaptive(EPOCHS, 0.3, rates=[1] * EPOCHS, **options),
    "ranked": lambda **options: fp.Ranked(
        EPOCHS, np.arange(N), 0.3, [1] * EPOCHS, suspects=0.2, **options
    ),
    "infobatch": lambda **options: fp.InfoBatch(EPOCHS, **options),
    "infobatch-save": lambda **options: fp.InfoBatch(EPOCHS, save=0.3, **options),
    "rs2": lambda **options: fp.RS2(EPOCHS, 0.3, **options),
    "rs2-replacement": lambda **options: fp.RS2(EPOCHS, 0.3, replacement=True, **options),
    "kakurenbo": lambda **options: fp.Kakurenbo(EPOCHS, **options),
    "ucb": lambda **options: fp.UCB(EPOCHS, 0.3, **options),
    "progressive-dropout": lambda **options: fp.ProgressiveDropout(
        EPOCHS, threshold=0.3, **{"anneal": 0.0, **options}
    ),
    "progressive-dropout-scalar": lambda **options: fp.ProgressiveDropout(
        EPOCHS, "scalar", decay=0.96, **{"anneal": 0.0, **options}
    ),
    "progressive-dropout-matched": lambda **options: fp.ProgressiveDropout(
        EPOCHS, "schedule-matched", threshold=0.3, **{"anneal": 0.0, **options}
    ),
    "adaptive-suspects": lambda **options: fp.Adaptive(
        EPOCHS, 0.3, rates=[1] * EPOCHS, patience=2, chance=5.0, **options
    ),
    "ucb-period": lambda **options: fp.UCB(EPOCHS, 0.2, period=3, epsilon=0.2, **options),
    "selective-backprop": lambda **options: fp.SelectiveBackprop(EPOCHS, begin=0.25, **options),
    "seta": lambda **options: fp.SeTa(EPOCHS, **options),
    "matched": lambda **options: Matched(EPOCHS, [100] * EPOCHS, [1.2] * EPOCHS, **options),
    "own": lambda **options: SkipsTheFirst(EPOCHS, **options),
    "full": lambda **options: fp.FullData(EPOCHS, **options),
    "align-prune": lambda **options: fp.AlignPrune(EPOCHS, 0.3, trajectory=3, **options),
    "repb": lambda **options: fp.RePB(EPOCHS, 0.3, **options),
}
every_policy = pytest.mark.parametrize("name", POLICIES)


def each_policy_with_one_of(name, values):
    """Parametrize a test by all policies and all values, but not by all pairs of them.

    The rules of the options are the same functions for all policies.
    """
    pairs = zip(POLICIES, itertools.cycle(values), strict=False)
    return pytest.mark.parametrize(("name", *name.split()), [(one, *row) for one, row in pairs])


def losses_of(epoch, index):
    """Return losses of which some are always high, so that the policies skip the same samples."""
    noise = np.random.default_rng(epoch).random(N, dtype=np.float32)
    return torch.from_numpy(noise + np.arange(N, dtype=np.float32) % 7)[index]


def made(policy, **options):
    return fp.Pruner(N, policy, **{"seed": 3, "batch_size": BATCH, "labels": LABELS, **options})


def train(pruner, stop=None):
    def rescored(epoch, index):
        return losses_of(epoch + 1000, index)

    return train_pruner(pruner, losses_of, rescored=rescored, stop=stop)


@functools.cache
def plans_of(name, **options):
    """Return the kept samples and the weights of each epoch of a whole training."""
    return train(made(POLICIES[name](**options)))[0]


def kept_of(plans):
    return [kept for kept, _ in plans]


def longest_skips(kept):
    """Return the largest number of epochs in a row in which a sample was skipped."""
    longest = run = np.zeros(N, dtype=int)
    for part in kept:
        run = run + 1
        run[part] = 0
        longest = np.maximum(longest, run)
    return int(longest.max())


# Each option with every policy


@each_policy_with_one_of("anneal", [(0.1,), (0.25,), (0.5,)])
def test_the_last_epochs_train_all_samples(name, anneal):
    plans = plans_of(name, anneal=anneal)
    annealed = math.ceil(anneal * EPOCHS)
    assert all(len(kept) == N and weights is None for kept, weights in plans[-annealed:])
    if name != "full":
        assert len(plans[-annealed - 1][0]) < N


@every_policy
def test_the_number_of_kept_samples_does_not_change(name):
    with_all = plans_of(name, rescale=True, keep_per_class=0.4, max_skips=3)
    if name in ("infobatch", "seta"):  # Their numbers depend on the losses of the chosen samples.
        return
    assert [len(kept) for kept, _ in with_all] == [len(kept) for kept, _ in plans_of(name)]


@each_policy_with_one_of("most", [(1,), (2,), (4,)])
def test_no_sample_is_skipped_more_often_in_a_row(name, most):
    assert longest_skips(kept_of(plans_of(name, max_skips=most))) <= most
    if name == "own":
        assert longest_skips(kept_of(plans_of(name))) > most


@each_policy_with_one_of("share", [(0.2,), (0.6,)])
def test_every_class_keeps_its_share(name, share):
    sizes = np.bincount(LABELS)
    for kept, _ in plans_of(name, keep_per_class=share):
        numbers = np.bincount(np.array(LABELS)[kept], minlength=CLASSES)
        assert (numbers >= np.ceil(share * sizes)).all()


@every_policy
def test_rescaled_weights_have_the_number_of_all_samples_as_their_sum(name):
    for kept, weights in plans_of(name, rescale=True):
        if len(kept) == N:
            continue
        assert weights is not None
        # InfoBatch's published weights have this sum in expectation only. In its other form, the
        # samples below the mean have no weight in an epoch that must skip all of them. AlignPrune
        # is InfoBatch with another score, and RePB's weights follow from the earlier epochs.
        # Kakurenbo's factor follows from the largest number that an epoch may skip.
        if not name.startswith(("infobatch", "align-prune", "repb", "kakurenbo")):
            assert sum(weights) == pytest.approx(N, rel=1e-5)


ALL_OPTIONS = {"anneal": 0.2, "rescale": True, "keep_per_class": 0.4, "max_skips": 2}
STOPS = [(0, 2), (4, 0), (5, 3), (11, 1)]


@pytest.mark.parametrize(
    ("name", "stop", "options"),
    [
        # Each policy stops everywhere, half of the times with options, and so does each stop.
        (name, stop, ALL_OPTIONS if (number + place) % 2 else {})
        for number, name in enumerate(POLICIES)
        for place, stop in enumerate(STOPS)
    ],
)
def test_a_stopped_training_continues_exactly(name, stop, options, tmp_path):
    def one():
        return made(POLICIES[name](**options))

    assert stopped_and_resumed(one, train, stop, tmp_path) == plans_of(name, **options)


def test_the_adaptive_policy_takes_the_steps_of_annealed_epochs_from_the_others():
    for anneal in (0.0, 0.25, 0.5):
        pruner = made(fp.Adaptive(EPOCHS, 0.3, rates=[1] * EPOCHS, anneal=anneal))
        numbers = [len(kept) for kept, _ in train(pruner)[0]]
        steps = sum(math.ceil(number / BATCH) for number in numbers)
        assert steps == pruner.total_steps() == round(0.7 * EPOCHS * N / BATCH)
    with pytest.raises(InputError, match=r"expected save below 0\.5, the share of the epochs"):
        fp.Adaptive(EPOCHS, 0.6, anneal=0.5)


# The weights


def reached(policy, options, values, epochs=1000, **pruner_options):
    """Return the mean over many epochs of the weighted sum of ``values`` over the kept samples."""
    pruner = fp.Pruner(len(values), policy(epochs, **options), **pruner_options)
    sums = []
    for _ in pruner.epochs():
        plan = pruner.plan
        weights = torch.ones(len(values)) if plan.weights is None else plan.weights
        sums.append(float((weights[plan.kept] * values[plan.kept]).sum()))
    return np.mean(sums)


def with_replacement(epochs, **options):
    return fp.RS2(epochs, 0.4, replacement=True, **options)


POWERS = torch.tensor([float(2 ** (sample % 5)) for sample in range(24)])


@pytest.mark.parametrize(
    "options",
    [
        {"rescale": True},
        {"rescale": True, "max_skips": 1},
        {"rescale": True, "max_skips": 2},
        {"rescale": True, "keep_per_class": 0.5},
    ],
)
def test_the_weighted_sum_has_the_expectation_of_the_sum_over_all_samples(options):
    mean = reached(with_replacement, options, POWERS, labels=[0] * 4 + [1] * 20)
    assert mean == pytest.approx(POWERS.sum().item(), rel=0.02)


def test_without_weights_the_sum_is_that_of_the_share_that_is_kept():
    assert reached(with_replacement, {}, POWERS) == pytest.approx(
        0.625 * POWERS.sum().item(), rel=0.02
    )


# Which samples are exchanged


@given(st.integers(2, 60), st.data())
@settings(deadline=None)
def test_forced_samples_come_first_and_only_others_are_exchanged(total, data):
    seed = data.draw(st.integers(0, 99))
    draw = np.random.default_rng(seed)
    kept = np.sort(draw.permutation(total)[: data.draw(st.integers(1, total))])
    skips = draw.integers(0, 6, total).astype(np.uint8)
    skips[kept] = data.draw(st.integers(0, 6))
    most = data.draw(st.integers(1, 6))
    forced = skips >= most
    labels = draw.integers(0, 4, total)
    labels = np.unique(labels, return_inverse=True)[1]
    share = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    quotas = np.ceil(np.bincount(labels) * share - 1e-9)
    options = AppliedOptions(fp.PlanOptions(keep_per_class=share, max_skips=most), total, labels)
    options.load_skips(torch.from_numpy(skips))
    plan = fp.EpochPlan(0, torch.from_numpy(kept))
    result = options.apply(plan, np.random.default_rng(1)).kept.numpy()
    assert len(result) == len(kept)
    assert (np.diff(result) > 0).all()
    chosen = np.isin(np.arange(total), result)
    needed = int(forced.sum())
    if needed <= len(kept):
        assert chosen[forced].all()
    else:
        assert forced[chosen].all()
        assert skips[chosen].min() >= skips[forced & ~chosen].max()
    counts = np.bincount(labels[chosen], minlength=len(quotas))
    of_forced = np.bincount(labels[forced], minlength=len(quotas))
    if np.maximum(quotas, of_forced).sum() <= len(kept):
        assert (counts >= quotas).all()
    already = np.bincount(labels[kept], minlength=len(quotas))
    if np.isin(np.flatnonzero(forced), kept).all() and (already >= quotas).all():
        assert (result == kept).all()


def test_the_exchanged_samples_are_random_ones():
    policy = SkipsTheFirst(400, max_skips=1)
    pruner = fp.Pruner(N, policy)
    counts = np.zeros(N, dtype=int)
    for _ in pruner.epochs():
        if pruner.plan.epoch % 2:
            assert set(range(40)) <= set(pruner.plan.kept.tolist())
        counts[pruner.plan.kept] += 1
    # Half of the samples from 40 on are exchanged in every second epoch.
    assert (counts[40:] > 250).all()
    assert (counts[40:] < 350).all()


# States and settings


def test_a_state_with_options_needs_the_same_options():
    state = made(POLICIES["random"](max_skips=3)).state_dict()
    different: dict[str, dict[str, Any]] = {
        "options=None": {},
        "max_skips=4, got 3": {"max_skips": 4},
        "anneal=0.1, got 0": {"max_skips": 3, "anneal": 0.1},
    }
    for message, other in different.items():
        with pytest.raises(InputError, match=f"expected a pruner state with {message}"):
            made(POLICIES["random"](**other)).load_state_dict(state)


def test_options_that_are_off_store_nothing():
    state = made(POLICIES["random"]()).state_dict()
    assert state["options"] is None
    assert state["skips"] is None


@each_policy_with_one_of(
    "options message",
    [
        ({"anneal": -0.1}, r"expected anneal as a share in \[0, 1\], got -0.1"),
        ({"anneal": float("nan")}, "expected anneal as a share"),
        ({"anneal": "0.1"}, "expected anneal as a share"),
        ({"rescale": 1}, "expected rescale as True or False, got 1"),
        ({"keep_per_class": 1.5}, "expected keep_per_class as a share"),
        ({"max_skips": 0}, "expected max_skips to be a whole number of at least 1, got 0"),
        ({"max_skips": 256}, "expected max_skips of at most 255, got 256"),
    ],
)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        POLICIES[name](**options)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, r"expected Pruner\(..., labels=...\) with the class of each sample"),
        ([0] * (N - 1), f"expected one label for each of {N} samples, got {N - 1}"),
        ([0.5] * N, "expected labels as integers"),
        ([[0]] * N, "expected labels as integers"),
        ([[0], [0, 1]], "expected labels as integers"),
    ],
)
def test_missing_or_wrong_labels_are_refused(labels, message):
    with pytest.raises(InputError, match=message):
        made(fp.RS2(EPOCHS, 0.3, keep_per_class=0.2), labels=labels)


def test_a_share_per_class_that_leaves_nothing_to_skip_is_refused():
    with pytest.raises(InputError, match="expected keep_per_class to need at most the"):
        made(fp.RS2(EPOCHS, 0.5, keep_per_class=0.9))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_labels_may_be_of_any_kind_and_have_gaps(kind):
    labels = kind([-7 if label == 0 else 100 * label for label in LABELS])
    policy = fp.RS2(EPOCHS, 0.3, keep_per_class=0.6)
    plans, _ = train(made(policy, labels=labels))
    assert kept_of(plans) == kept_of(train(made(policy))[0])
