"""How well a ranking finds wrong labels: exact figures."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from fineprune.runs.summary import Detection
from fineprune.training.results import detection

WRONG = st.lists(st.booleans(), min_size=1, max_size=40)


def figures(scores, wrong, suspects=0):
    return detection(np.array(scores, dtype=np.float32), suspects, np.array(wrong, dtype=np.bool_))


def test_the_figures_of_five_samples():
    assert figures([4, 3, 2, 1, 0], [True, False, True, False, False], suspects=4) == Detection(
        wrong=2,
        wrong_share=0.4,
        roc_area=5 / 6,  # Of six pairs, five are in the right order.
        average_precision=0.5 * 1 + 0.5 * 2 / 3,
        suspects=4,
        precision=2 / 4,
        recall=1.0,
        r_precision=1 / 2,
    )


@pytest.mark.parametrize(("scores", "area"), [([1, 0], 1.0), ([0, 1], 0.0), ([math.nan, 0], 0.0)])
def test_the_area_of_one_pair(scores, area):
    assert figures(scores, [True, False]).roc_area == area


@given(WRONG, st.randoms())
def test_area_and_average_precision_are_those_of_scikit_learn(wrong, random):
    assume(any(wrong) and not all(wrong))
    scores = random.sample(range(len(wrong)), len(wrong))
    found = figures(scores, wrong)
    assert found.roc_area == pytest.approx(roc_auc_score(wrong, scores))
    assert found.average_precision == pytest.approx(average_precision_score(wrong, scores))


def test_figures_that_are_not_defined_are_none():
    right = figures([1, 2], [False, False], suspects=1)
    assert (right.roc_area, right.average_precision, right.recall, right.r_precision) == (None,) * 4
    assert right.precision == 0
    assert figures([1, 2], [True, True]).roc_area is None
    none = figures([1, 2], [True, False])
    assert (none.precision, none.recall) == (None, 0.0)
