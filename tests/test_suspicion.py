"""How well a suspicion finds wrong labels: exact figures, also with equal values."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

import fineprune as fp
from fineprune.errors import InputError
from fineprune.training.suspicion import FIGURES, Suspicion, detection, suspicion_of

VALUES_AND_WRONG = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=40)


def figures(values, wrong, suspects=None):
    given_values = torch.tensor(values, dtype=torch.float32)
    return detection(Suspicion(given_values, suspects), np.array(wrong, dtype=np.bool_))


def test_the_figures_of_five_samples():
    found = figures([3, 2, 2, 1, 0], [True, True, False, False, False], suspects=4)
    assert found == {
        "roc_area": 5.5 / 6,  # Of six pairs, five are in the right order and one is a tie.
        "average_precision": pytest.approx(0.5 * 1 + 0.5 * 2 / 3),
        "suspects": 4,
        "precision": 2 / 4,
        "recall": 1.0,
        "r_precision": 1.5 / 2,  # The first sample, and one of the next two.
    }
    assert tuple(found) == FIGURES


@pytest.mark.parametrize(
    ("values", "area"), [([1, 0], 1.0), ([0, 1], 0.0), ([1, 1], 0.5), ([math.nan, 0], 0.0)]
)
def test_the_area_of_one_pair(values, area):
    assert figures(values, [True, False])["roc_area"] == area


@given(VALUES_AND_WRONG)
def test_area_and_average_precision_are_those_of_scikit_learn(pairs):
    values, wrong = (np.array(part) for part in zip(*pairs, strict=True))
    assume(wrong.any() and not wrong.all())
    found = figures(values, wrong)
    assert found["roc_area"] == pytest.approx(roc_auc_score(wrong, values))
    assert found["average_precision"] == pytest.approx(average_precision_score(wrong, values))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_precision_and_recall_are_means_over_all_orders_of_equal_values(pairs, suspects):
    assume(suspects <= len(pairs))
    wrong = [label for _, label in pairs]

    def mean_hits(chosen):
        # Sorting is stable, so equal values stay in the order of the permutation.
        orders = [
            sorted(order, key=lambda pair: -pair[0]) for order in itertools.permutations(pairs)
        ]
        return np.mean([sum(label for _, label in order[:chosen]) for order in orders])

    found = figures([value for value, _ in pairs], wrong, suspects)
    assert found["precision"] == pytest.approx(mean_hits(suspects) / suspects)
    if any(wrong):
        assert found["recall"] == pytest.approx(mean_hits(suspects) / sum(wrong))
        assert found["r_precision"] == pytest.approx(mean_hits(sum(wrong)) / sum(wrong))


def test_figures_that_are_not_defined_are_none():
    right = figures([1, 2], [False, False], suspects=1)
    assert right == {**dict.fromkeys(FIGURES), "suspects": 1, "precision": 0.0}
    assert figures([1, 2], [True, True])["roc_area"] is None
    none = figures([1, 2], [True, False], suspects=0)
    assert (none["precision"], none["recall"]) == (None, 0.0)


def test_a_suspicion_of_another_length_is_refused():
    with pytest.raises(InputError, match=r"each of 2 samples .* got shape \(3,\)"):
        figures([1, 2, 3], [True, False])


def observed(policy, epochs):
    """Train all samples in one batch per epoch; the last two have large losses."""
    policy.begin(fp.Training(5, 1, 5))
    losses = np.array([0.1, 0.1, 0.1, 3.0, 3.0], dtype=np.float32)
    for epoch in range(epochs):
        policy.learn(epoch, losses, losses > 1.26, None)
    return suspicion_of(policy)


def test_the_suspicion_of_fine_pruning_is_its_counts():
    schedule = fp.Schedule(epochs=9, window=9, start=5)
    found = observed(fp.FinePruning(schedule, prune=2), 3)
    assert found.values.dtype == torch.float32
    assert found.values.tolist() == [0, 0, 0, 3, 3]
    assert found.suspects == 2
    assert observed(fp.FinePruning(schedule, prune=0), 3).suspects is None


@pytest.mark.parametrize("policy", [fp.FullData(3), fp.RandomPruning(fp.Schedule(3, 3, 1), 1)])
def test_other_policies_suspect_no_samples(policy):
    assert suspicion_of(policy) is None
