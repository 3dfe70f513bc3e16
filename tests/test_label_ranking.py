"""The ranking of labels, beside a literal implementation of the rule that its module states."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fineprune.labels.spared_classes import of_unlearned_classes
from hypothesis import given, settings
from hypothesis import strategies as st

from fineprune.labels.evidence import Evidence
from fineprune.labels.ranking import num_wrong, rank


def made_evidence(shares, labels, classes):
    """Return the evidence of one epoch whose softmax is this, without samples labelled -1."""
    evidence = Evidence(len(labels), classes, None)
    index = np.flatnonzero(np.array(labels) >= 0)
    given = torch.tensor([labels[i] for i in index])
    evidence.record(torch.from_numpy(index), torch.tensor(shares)[index].log(), given, 1)
    return evidence


def rule(shares, labels, classes):
    """Follow the rule word by word, for lists of floats and labels.

    Returns:
        The scores, the suggestions, the estimated numbers of samples of each pair, which samples
        are confused, and whether mistakes are consistent.
    """
    every = range(classes)
    samples = [i for i, label in enumerate(labels) if label >= 0]
    of = {k: [i for i in samples if labels[i] == k] for k in every}
    present = [k for k in every if of[k]]
    mean_share = sum(shares[i][labels[i]] for i in samples) / len(samples)
    t = {}
    for k in present:
        own = [shares[i][k] for i in of[k]]
        usual = mean_share if len(own) == 1 else sum(own) / len(own)
        t[k] = max(usual, mean_share / 2)
    threshold = {}
    for k in present:
        ranked = sorted((shares[i][k] for i in of[k]), reverse=True)
        few = max(10, math.ceil(len(ranked) / 5))
        reached = ranked[min(math.ceil(len(ranked) / 2), few) - 1]
        threshold[k] = max(reached, 0.5 / classes)
    clear = [[0] * classes for _ in every]
    for i in samples:
        for k in present:
            clear[labels[i]][k] += shares[i][k] >= max(threshold[k], shares[i][labels[i]] / 2)
    n = [sum(clear[y][k] for y in every) for k in every]

    given = {(y, k): clear[y][k] / max(n[k], 1) for y in present for k in present}
    number = {k: float(len(of[k])) for k in present}
    for _ in range(2):
        expected = {y: sum(given[y, k] * number[k] for k in present) for y in present}
        number = {
            k: sum(
                given[y, k] * number[k] / expected[y] * len(of[y]) for y in present if expected[y]
            )
            for k in present
        }
    rates = [[float(y == k) for k in every] for y in every]
    for y in present:
        row = [given[y, k] * number[k] if k in number else 0 for k in every]
        if sum(row):
            rates[y] = [value / sum(row) for value in row]
    pairs = [(y, k) for y in every for k in every if y != k]
    used = sum(number > 0 for number in n)
    of_used = used * (used - 1)
    mean = sum(rates[y][k] for y, k in pairs) / max(of_used, 1)
    of_used = max(of_used, 2)
    first = sum(clear[y][k] / max(n[k], 2) for y, k in pairs) / of_used
    second = (
        sum(clear[y][k] * (clear[y][k] - 1) / (max(n[k], 2) * (max(n[k], 2) - 1)) for y, k in pairs)
        / of_used
    )
    ratio = first**2 / second if second else math.inf * first if first else 0
    even = min(1, max(0, (ratio * of_used - 1) / (of_used - 1)))
    chance = 1 / max(len(present), 2)
    learned = (max(threshold.values()) - chance) / (1 - chance)
    unlearned = min(1, max(0, (0.2 - learned) / 0.1))
    clearly = [k for k in every if n[k]]
    right = sum(rates[k][k] for k in clearly) / max(len(clearly), 1)
    sparse = [max(1 / max(n[k], 1), (12 / max(n[k], 1)) ** 3) for k in every]
    drawn = [min(1, 3 * (even + sparse[k])) for k in every]
    prior = [[0.0] * classes for _ in every]
    for y in every:
        for k in every:
            part = drawn[k] + (1 - drawn[k]) * unlearned
            prior[y][k] = (1 - part) * rates[y][k] + part * mean + 2**-24
        kept = rates[y][y] + unlearned * (right - rates[y][y]) if n[y] else rates[y][y]
        prior[y][y] = max(kept, 2**-24)

    scores, suggestions = [-math.inf] * len(labels), [-1] * len(labels)
    by_rates = [[rates[y][k] * len(of[y]) for k in every] for y in every]
    by_samples = [[0.0] * classes for _ in every]
    for i in samples:
        y = labels[i]
        weight = [max(shares[i][k], 2**-24) / t[k] * prior[y][k] if k in t else 0 for k in every]
        others = [k for k in every if k != y]
        scores[i] = math.log(sum(weight[k] for k in others)) - math.log(weight[y])
        suggestions[i] = max(others, key=lambda k: weight[k])
        strongest = max(shares[i][k] / t[k] if k in t else 0 for k in others)
        by_samples[y][suggestions[i] if strongest > 2 * shares[i][y] / t[y] else y] += 1
    # After a single visit, no sample was answered otherwise more than once, so none is late.
    joint = max(by_rates, by_samples, key=lambda numbers: sum(numbers[y][k] for y, k in pairs))
    agreed = {i: max(shares[i]) == shares[i][labels[i]] for i in samples}
    little = sum(drawn[k] for k in clearly) / max(len(clearly), 1)
    begins = 0.95 - 0.05 * little**2
    by_heart = min(1, max(0, (sum(agreed.values()) / len(samples) - begins) / 0.03))
    for i in samples:
        scores[i] += by_heart * math.log((1.5 - agreed[i]) / 2)
    ranked = sorted((scores[i] for i in samples), reverse=True)

    def level(numbers):
        wrong = min(round(sum(numbers[y][k] for y, k in pairs)), len(samples) - 1)
        return (ranked[max(wrong - 1, 0)] + ranked[wrong]) / 2

    confused = [even < 1 / 3 and score > level(by_rates) for score in scores]
    consistent = joint is by_rates
    scores = [float(score - level(joint)) for score in scores]
    return scores, suggestions, joint, confused, consistent


@settings(max_examples=250, derandomize=True, deadline=None)
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
    scores, suggestions, joint, confused, consistent = rule(stored, labels.tolist(), classes)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.suggestions, suggestions)
    np.testing.assert_allclose(found.joint, joint, rtol=1e-9)
    np.testing.assert_array_equal(found.confused, confused)
    assert found.consistent == consistent


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


def learned_in(epochs, labels=None, classes=4):
    """Return the ranking after 60 epochs in a network that answers otherwise so many times.

    After that, it answers each of the samples as it is labelled, and is sure of it.
    """
    samples = len(epochs)
    evidence = Evidence(samples, classes, None)
    labels = torch.arange(samples) % classes if labels is None else labels
    for epoch in range(60):
        strongest = torch.where(epochs <= epoch, labels, (labels + 1) % classes)
        logits = 12.0 * torch.nn.functional.one_hot(strongest, classes)
        evidence.record(torch.arange(samples), logits, labels, 1)
    evidence.flush()
    return rank(evidence)


def test_wrong_labels_that_were_learned_by_heart_last_rank_first_and_are_counted():
    """The weights of late visits leave nothing else to tell them by."""
    found = learned_in(torch.where(torch.arange(400) < 20, 10, 2))
    assert found.answered == 1
    assert sorted(found.suspects()[0][:20].tolist()) == list(range(20))
    assert found.num_suspects == int((found.scores > 0).sum()) == 20
    assert found.joint.diagonal(1).sum() + found.joint[3, 0] == 20


def test_the_wrong_labels_that_were_learned_by_heart_are_a_second_hill():
    """Right labels that are hard are the tail of the first one."""
    chance = np.random.default_rng(0)
    right = torch.from_numpy(chance.geometric(0.4, 2000))
    wrong = torch.from_numpy(chance.normal(16, 3, 200).round().astype(np.int64))
    assert learned_in(right).num_suspects == 0
    assert 160 <= learned_in(torch.cat([right, wrong])).num_suspects <= 220
    # A class that is learned late as a whole has right labels, and its own hill.
    late = torch.where(torch.arange(2000) % 4 == 3, right + 14, right)
    assert learned_in(late).num_suspects == 0
    # So do small classes, which are more often learned late.
    few = torch.cat([right, right[:150] + 14])
    labels = torch.cat([torch.arange(2000) % 4, 4 + torch.arange(150) % 10])
    assert learned_in(few, labels, 14).num_suspects == 0
    # If they are most, it does not know them from the others.
    assert learned_in(torch.cat([right[:200], wrong.repeat(3)])).num_suspects == 0


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
        mistakes = joint.clone().fill_diagonal_(0)
        largest = mistakes.flatten().topk(len(pairs)).indices.tolist()
        assert {(i // 8, i % 8) for i in largest} == {(y, k) for k, y in pairs.items()}


def test_wrong_labels_that_are_hardly_trained_are_counted():
    """Their shares are those of an early network, and reach those of no other sample."""
    shares, labels, _ = noisy_shares(8, None, share=0.0)
    late = shares**4 / (shares**4).sum(1, keepdims=True)
    wrong = np.arange(len(labels)) % 4 == 0
    given = np.where(wrong, (labels + 1 + np.arange(len(labels)) // 4 % 7) % 8, labels)
    evidence = made_evidence(np.where(wrong[:, None], shares, late), given.tolist(), 8)
    joint = rank(evidence).joint
    assert 0.8 * wrong.sum() < joint.sum() - joint.trace() < 1.2 * wrong.sum()


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


def test_wrong_labels_are_found_in_classes_of_few_samples():
    shares, labels, true = noisy_shares(100, None, samples=600, share=0.1)
    wrong = labels != true
    found = rank(made_evidence(shares, labels.tolist(), 100))
    assert wrong.sum() < found.num_suspects < len(labels) / 2  # This network learned little.
    by_loss = -np.log(shares[np.arange(len(labels)), labels])
    assert roc_area(found.scores.numpy(), wrong) > roc_area(by_loss, wrong) - 0.01


def test_samples_are_confused_if_mistakes_are_in_few_pairs_of_classes():
    for pairs, few in ((None, False), ({0: 1, 1: 0}, True)):
        shares, labels, true = noisy_shares(10, pairs)
        confused = rank(made_evidence(shares, labels.tolist(), 10)).confused.numpy()
        assert confused.any() == few
        assert not few or (labels != true)[confused].mean() > 0.5


def test_many_classes_are_ranked_by_the_strongest_ones():
    """The stored classes give almost the ranking that all of them give."""
    classes = 100
    shares, labels, true = noisy_shares(classes, None, samples=6000)
    few, every = Evidence(6000, classes, 16), Evidence(6000, classes, None)
    for evidence in (few, every):
        logits = torch.from_numpy(shares).float().log()
        evidence.record(torch.arange(6000), logits, torch.from_numpy(labels), 1)
    wrong = labels != true
    areas = [roc_area(rank(evidence).scores.numpy(), wrong) for evidence in (few, every)]
    assert areas[0] > areas[1] - 0.01


def test_as_many_scores_are_positive_as_labels_are_estimated_to_be_wrong():
    """Also if the wrong labels are partly learned, so that few of them are clear."""
    shares, labels, true = noisy_shares(4, None)
    learned = 0.1 * np.eye(4)[labels] + 0.9 * shares
    for kept in (shares, learned):
        found = rank(made_evidence(kept, labels.tolist(), 4))
        positive = int((found.scores > 0).sum())
        assert positive == round(num_wrong(found.joint)) > 0
        assert (labels != true)[found.scores.numpy() > 0].mean() > 0.5
    sure = np.eye(4)[true] * 0.97 + 0.01
    assert not (rank(made_evidence(sure, true.tolist(), 4)).scores > 0).any()


def test_labels_whose_shares_are_all_zero_are_ranked():
    """As of a certain network on labels in another order of the classes."""
    true = torch.arange(60) % 3
    evidence = Evidence(60, 3, None)
    noise = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    logits = 40.0 * torch.nn.functional.one_hot(true, 3) + noise
    evidence.record(torch.arange(60), logits, (true + 1) % 3, 1)
    evidence.flush()
    ranking = rank(evidence)
    assert ranking.scores.isfinite().all()
    assert torch.equal(ranking.suggestions, true)


def test_equal_shares_favour_no_class():
    labels = [0, 1] * 20
    found = rank(made_evidence(np.full((40, 2), 0.5), labels, 2))
    assert torch.allclose(found.scores, found.scores[0].expand(40))


def test_classes_that_look_wrong_as_a_whole_are_told_from_many_wrong_labels():
    labels = torch.arange(160) % 16

    def classes(marked, labels=labels, least=0.5):
        return labels[of_unlearned_classes(labels, marked, least)].unique().tolist()

    assert classes(labels < 3) == [0, 1, 2]
    assert classes(labels < 12) == list(range(12))
    assert classes((labels < 3) & (torch.arange(160) < 80)) == []
    assert classes(torch.arange(160) < 120) == []
    assert classes(labels < 3, torch.where(labels < 1, -1, labels)) == [1, 2]
    # A few samples are no class.
    assert classes(torch.arange(160) < 40, torch.arange(160)) == []
    assert classes(labels < 0, torch.full((160,), -1)) == []
