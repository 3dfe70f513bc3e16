"""The options that every policy takes: anneal and rescale."""

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from resuming import stopped_and_resumed, train_pruner

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.policies.matched import Matched

N, BATCH, EPOCHS = 120, 5, 12
LABELS = [sample % 6 if sample % 3 else 0 for sample in range(N)]


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
    "infobatch": lambda **options: fp.InfoBatch(EPOCHS, **options),
    "infobatch-save": lambda **options: fp.InfoBatch(EPOCHS, save=0.3, **options),
    "rs2": lambda **options: fp.RS2(EPOCHS, 0.3, **options),
    "rs2-replacement": lambda **options: fp.RS2(EPOCHS, 0.3, replacement=True, **options),
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
    return train_pruner(pruner, losses_of, stop=stop)


@functools.cache
def plans_of(name, **options):
    """Return the kept samples and the weights of each epoch of a whole training."""
    return train(made(POLICIES[name](**options)))[0]


def kept_of(plans):
    return [kept for kept, _ in plans]


# Each option with every policy


@each_policy_with_one_of("anneal", [(0.1,), (0.25,), (0.5,)])
def test_the_last_epochs_train_all_samples(name, anneal):
    plans = plans_of(name, anneal=anneal)
    annealed = math.ceil(anneal * EPOCHS)
    assert all(len(kept) == N and weights is None for kept, weights in plans[-annealed:])
    if name != "full":
        assert len(plans[-annealed - 1][0]) < N


@every_policy
def test_weights_do_not_change_which_samples_are_kept(name):
    assert kept_of(plans_of(name, rescale=True)) == kept_of(plans_of(name))


@every_policy
def test_rescaled_weights_have_the_number_of_all_samples_as_their_sum(name):
    for kept, weights in plans_of(name, rescale=True):
        if len(kept) == N:
            continue
        assert weights is not None
        # InfoBatch's published weights have this sum in expectation only. In its other form, the
        # samples below the mean have no weight in an epoch that must skip all of them. AlignPrune
        # is InfoBatch with another score, and RePB's weights follow from the earlier epochs.
        if not name.startswith(("infobatch", "align-prune", "repb")):
            assert sum(weights) == pytest.approx(N, rel=1e-5)


ALL_OPTIONS = {"anneal": 0.2, "rescale": True}
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


# The weights


def reached(policy, options, values, epochs=1000):
    """Return the mean over many epochs of the weighted sum of ``values`` over the kept samples."""
    pruner = fp.Pruner(len(values), policy(epochs, **options))
    sums = []
    for _ in pruner.epochs():
        plan = pruner.plan
        weights = torch.ones(len(values)) if plan.weights is None else plan.weights
        sums.append(float((weights[plan.kept] * values[plan.kept]).sum()))
    return np.mean(sums)


def with_replacement(epochs, **options):
    return fp.RS2(epochs, 0.4, replacement=True, **options)


POWERS = torch.tensor([float(2 ** (sample % 5)) for sample in range(24)])


def test_the_weighted_sum_has_the_expectation_of_the_sum_over_all_samples():
    mean = reached(with_replacement, {"rescale": True}, POWERS)
    assert mean == pytest.approx(POWERS.sum().item(), rel=0.02)


def test_without_weights_the_sum_is_that_of_the_share_that_is_kept():
    assert reached(with_replacement, {}, POWERS) == pytest.approx(
        0.625 * POWERS.sum().item(), rel=0.02
    )


# States and settings


def test_a_state_with_options_needs_the_same_options():
    state = made(POLICIES["random"](anneal=0.2)).state_dict()
    different: dict[str, dict[str, Any]] = {
        "options=None": {},
        "anneal=0.1, got 0.2": {"anneal": 0.1},
        "rescale=True, got False": {"anneal": 0.2, "rescale": True},
    }
    for message, other in different.items():
        with pytest.raises(InputError, match=f"expected a pruner state with {message}"):
            made(POLICIES["random"](**other)).load_state_dict(state)


def test_options_that_are_off_store_nothing():
    state = made(POLICIES["random"]()).state_dict()
    assert state["options"] is None


@each_policy_with_one_of(
    "options message",
    [
        ({"anneal": -0.1}, r"expected anneal as a share in \[0, 1\], got -0.1"),
        ({"anneal": float("nan")}, "expected anneal as a share"),
        ({"anneal": "0.1"}, "expected anneal as a share"),
        ({"rescale": 1}, "expected rescale as True or False, got 1"),
    ],
)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        POLICIES[name](**options)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * (N - 1), f"expected one label for each of {N} samples, got {N - 1}"),
        ([0.5] * N, "expected labels as integers"),
        ([[0]] * N, "expected labels as integers"),
        ([[0], [0, 1]], "expected labels as integers"),
    ],
)
def test_wrong_labels_are_refused(labels, message):
    with pytest.raises(InputError, match=message):
        made(fp.RS2(EPOCHS, 0.3), labels=labels)
