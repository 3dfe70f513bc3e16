"""The ranking of labels, beside a literal implementation of the rule that its module states."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fineprune.labels.evidence import Evidence
from fineprune.labels.ranking import rank


def made_evidence(shares, labels, classes):
    """Return the evidence of one epoch whose softmax is this, without samples labelled -1."""
    evidence = Evidence(len(labels), classes)
    index = np.flatnonzero(np.array(labels) >= 0)
    given = torch.tensor([labels[i] for i in index])
    evidence.record(torch.from_numpy(index), torch.tensor(shares)[index].log(), given)
    return evidence


def rule(shares, labels, classes):
    """Follow the rule word by word, for lists of floats and labels.

    Returns:
        The scores, the suggestions and the estimated numbers of samples of each pair.
    """
    every = range(classes)
    samples = [i for i, label in enumerate(labels) if label >= 0]
    mean = sum(shares[i][labels[i]] for i in samples) / len(samples)
    t = []
    for k in every:
        own = [shares[i][k] for i in samples if labels[i] == k]
        t.append((sum(own) + mean) / (len(own) + 1))
    joint = [[0.5] * classes for _ in every]
    for i in samples:
        ratios = [shares[i][k] / t[k] for k in every]
        if max(ratios) >= 1:
            tied = ratios[labels[i]] == max(ratios)
            joint[labels[i]][labels[i] if tied else ratios.index(max(ratios))] += 1
    scores, suggestions = [-math.inf] * len(labels), [-1] * len(labels)
    pairs = [[0] * classes for _ in every]
    for i in samples:
        y = labels[i]
        logs = [
            math.log(max(shares[i][k], 2**-24)) - math.log(t[k]) + math.log(joint[y][k]) / 4
            for k in every
        ]
        others = [k for k in every if k != y]
        suggestions[i] = max(others, key=lambda k: logs[k])
        scores[i] = logs[suggestions[i]] - logs[y]
        pairs[y][suggestions[i] if scores[i] > 0 else y] += 1
    return scores, suggestions, pairs


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(2, 250), st.booleans())
def test_the_ranking_follows_the_rule(seed, classes, samples, all_classes):
    chance = np.random.default_rng(seed)
    number = 1 + (classes if all_classes else max(classes - 1, 2))
    labels = chance.choice(number, samples, p=chance.dirichlet(np.ones(number))) - 1
    labels[:2] = 0, 1
    # How well each class was learned: not at all, hardly, usually or nearly by heart.
    learned = chance.choice([[0.0] * 3, [0.1, 0.3, 0.3], [0.3, 2.0, 5.0], [3.3, 3.5, 5.0]])
    learned = chance.choice(learned, classes)
    logits = min(max(learned) + 0.1, 1) * chance.normal(size=(samples, classes))
    logits += (learned[:, None] * np.eye(classes))[labels]
    shares = torch.from_numpy(logits).softmax(1).numpy()
    evidence = made_evidence(shares, labels.tolist(), classes)
    stored = [row for chunk in evidence.chunks() for row in chunk.shares.tolist()]
    found = rank(evidence)
    scores, suggestions, joint = rule(stored, labels.tolist(), classes)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.suggestions, suggestions)
    np.testing.assert_array_equal(found.joint, joint)
    assert found.num_suspects == sum(score > 0 for score in scores)


def test_parts_of_any_size_give_the_same_ranking(monkeypatch):
    chance = np.random.default_rng(0)
    labels = chance.integers(0, 5, 300)
    shares = torch.from_numpy(chance.normal(size=(300, 5)) + 2 * np.eye(5)[labels]).softmax(1)
    evidence = made_evidence(shares.numpy(), labels.tolist(), 5)
    whole = rank(evidence)
    monkeypatch.setattr("fineprune.labels.evidence._CHUNK", 35)
    parts = rank(evidence)
    assert torch.equal(whole.scores, parts.scores)
    assert torch.equal(whole.suggestions, parts.suggestions)


def test_evidence_on_a_device_that_may_have_no_float64_is_ranked_on_the_cpu():
    on_cpu = made_evidence([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], [0, 1, 1], 2)
    # PyTorch has no other device here that holds values, so this one only claims to.
    elsewhere: Any = SimpleNamespace(labels=on_cpu.labels.to("meta"), on_cpu=lambda: on_cpu)
    assert torch.equal(rank(elsewhere).scores, rank(on_cpu).scores)


def noisy_shares(classes, wrong_pairs, seed=0, samples=4000, share=0.3):
    """Return the softmax of a made-up network that has learned the noisy labels of easy samples.

    Args:
        classes: The number of classes.
        wrong_pairs: The class that a label is replaced by, for some classes; None for any other.
    """
    chance = np.random.default_rng(seed)
    true = chance.integers(0, classes, samples)
    labels = true.copy()
    noise = np.zeros((classes, classes))
    for k in range(classes):
        if wrong_pairs is None:
            noise[k] = share / (classes - 1)
            noise[k, k] = 1 - share
        else:
            noise[k, k] = 1
            if k in wrong_pairs:
                noise[k, k], noise[k, wrong_pairs[k]] = 1 - share, share
        members = np.flatnonzero(true == k)
        labels[members] = chance.choice(classes, size=len(members), p=noise[k])
    logits = chance.normal(size=(samples, classes)) + 3 * np.eye(classes)[true]
    clean = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return clean @ noise, labels, true


def roc_area(scores, wrong):
    order = np.argsort(np.argsort(scores))
    hits, misses = wrong.sum(), (~wrong).sum()
    return (order[wrong].sum() - hits * (hits - 1) / 2) / (hits * misses)


@pytest.mark.parametrize("pairs", [None, {1: 2, 2: 1}, {0: 3, 4: 5}])
def test_wrong_labels_are_found_and_counted_whether_they_are_random_or_consistent(pairs):
    shares, labels, true = noisy_shares(8, pairs)
    evidence = made_evidence(shares, labels.tolist(), 8)
    found = rank(evidence)
    joint = found.joint
    wrong = labels != true
    scores = found.scores.numpy()
    by_loss = -np.log(shares[np.arange(len(labels)), labels])
    assert roc_area(scores, wrong) > (0.95 if pairs is None else roc_area(by_loss, wrong) + 0.02)
    assert roc_area(scores, wrong) > 0.93
    first = np.argsort(-scores)[: wrong.sum() // 2]
    right = found.suggestions.numpy()[first] == true[first]
    assert right[wrong[first]].mean() > 0.9
    estimated = float(joint.sum() - joint.trace())
    assert 0.7 * wrong.sum() < estimated < 1.5 * wrong.sum()
    if pairs:
        mistakes = joint.fill_diagonal_(0)
        largest = mistakes.flatten().topk(len(pairs)).indices.tolist()
        assert {(i // 8, i % 8) for i in largest} == {(y, k) for k, y in pairs.items()}


def test_outputs_that_no_label_uses_change_no_ranking():
    shares, labels, true = noisy_shares(10, None, share=0.1)
    small = rank(made_evidence(shares, labels.tolist(), 10))
    padded = np.hstack([shares, np.full((len(labels), 30), 1e-6)])
    large = rank(made_evidence(padded, labels.tolist(), 40))
    wrong = labels != true
    for found in (small, large):
        assert (found.suggestions.numpy()[wrong] == true[wrong]).mean() > 0.85
    assert roc_area(large.scores.numpy(), wrong) > roc_area(small.scores.numpy(), wrong) - 1e-3


def test_a_label_that_was_mistyped_once_makes_no_others_suspicious():
    shares, labels, true = noisy_shares(10, None, share=0.02)
    given = labels.copy()
    given[:5] = np.arange(10, 15)  # Each is a class of its own, which the network never learned.
    noise = np.abs(np.random.default_rng(1).normal(scale=1e-4, size=(len(labels), 5)))
    found = rank(made_evidence(np.hstack([shares, noise]), given.tolist(), 15))
    before = rank(made_evidence(shares, labels.tolist(), 10))
    assert found.num_suspects < before.num_suspects + 20
    assert roc_area(found.scores.numpy(), np.arange(len(labels)) < 5) > 0.98
    assert (found.suggestions.numpy()[:5] == true[:5]).mean() > 0.7


def test_a_sure_network_suspects_no_right_label_also_in_classes_of_one_sample_and_of_none():
    labels = np.array([0] * 50 + [1] * 49 + [2])
    sure = np.eye(4)[labels] * 0.9 + 0.025
    found = rank(made_evidence(sure, labels.tolist(), 4))
    assert found.num_suspects == 0
    assert found.answered.tolist()[:3] == [1, 1, 1]
    assert math.isnan(found.answered[3])


def test_labels_whose_shares_are_all_zero_are_ranked():
    """As of a certain network on labels in another order of the classes."""
    true = torch.arange(60) % 3
    evidence = Evidence(60, 3)
    noise = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    logits = 40.0 * torch.nn.functional.one_hot(true, 3) + noise
    evidence.record(torch.arange(60), logits, (true + 1) % 3)
    evidence.flush()
    ranking = rank(evidence)
    assert ranking.scores.isfinite().all()
    assert torch.equal(ranking.suggestions, true)


def test_equal_shares_favour_no_class():
    labels = [0, 1] * 20
    found = rank(made_evidence(np.full((40, 2), 0.5), labels, 2))
    assert torch.allclose(found.scores, found.scores[0].expand(40))
