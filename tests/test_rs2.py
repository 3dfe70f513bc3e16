"""RS2: every sample is chosen once per round, and a slow twin agrees."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fineprune as fp
from fineprune.pruning.random_streams import stream


def kept_samples(pruner, epochs=None):
    kept = []
    for epoch in epochs or range(pruner.policy.epochs):
        pruner.set_epoch(epoch)
        kept.append(pruner.plan.kept.tolist())
    return kept


def twin(num_samples, per_epoch, epochs, seed):
    """Deal the samples like cards: shuffle again when none is left, without a repeat per epoch."""
    rounds = 0
    cards = stream(seed, rounds, "rs2").permutation(num_samples).tolist()
    parts = []
    for _ in range(epochs):
        hand: list[int] = []
        while len(hand) < per_epoch:
            if not cards:
                rounds += 1
                cards = stream(seed, rounds, "rs2").permutation(num_samples).tolist()
            card = next(card for card in cards if card not in hand)
            cards.remove(card)
            hand.append(card)
        parts.append(sorted(hand))
    return parts


@given(st.integers(2, 40), st.data(), st.integers(1, 12), st.integers(0, 5))
@settings(deadline=None)
def test_the_subsets_equal_those_of_a_twin_that_deals_cards(num_samples, data, epochs, seed):
    skipped = data.draw(st.integers(1, num_samples - 1))
    policy = fp.RS2(epochs, skipped / num_samples)
    pruner = fp.Pruner(num_samples, policy, seed=seed)
    kept = kept_samples(pruner)
    per_epoch = len(kept[0])
    assert per_epoch == num_samples - skipped
    assert kept == twin(num_samples, per_epoch, epochs, seed)
    counts = Counter({sample: 0 for sample in range(num_samples)})
    for part in kept:
        assert len(set(part)) == per_epoch
        counts.update(part)
        # All samples are chosen before any is chosen again. An epoch may reach into a new round.
        assert max(counts.values()) - min(counts.values()) <= 2
    assert max(counts.values()) <= -(-per_epoch * epochs // num_samples)


@pytest.mark.parametrize("batch", [None, 4, 10])
def test_without_replacement_all_samples_are_chosen_before_any_again(batch):
    kept = kept_samples(fp.Pruner(100, fp.RS2(5, 0.8), batch_size=batch))
    first_round = 100 // len(kept[0])
    chosen = [sample for part in kept[:first_round] for sample in part]
    assert len(chosen) == len(set(chosen))


def test_with_replacement_epochs_are_independent_and_equally_likely():
    kept = kept_samples(fp.Pruner(40, fp.RS2(400, 0.5, replacement=True)))
    assert all(len(part) == 20 for part in kept)
    counts = np.bincount(np.concatenate(kept), minlength=40)
    assert counts.min() > 150
    assert counts.max() < 250
    overlaps = [len(set(a) & set(b)) for a, b in itertools.pairwise(kept)]
    assert 9 < np.mean(overlaps) < 11


def test_seeds_give_other_subsets_and_the_order_of_the_calls_does_not_matter():
    one, other = (fp.Pruner(50, fp.RS2(9, 0.3), seed=seed) for seed in (1, 2))
    kept = kept_samples(one)
    assert kept != kept_samples(other)
    backwards = kept_samples(fp.Pruner(50, fp.RS2(9, 0.3), seed=1), range(8, -1, -1))
    assert backwards[::-1] == kept


def test_each_epoch_is_rounded_up_to_whole_steps():
    """The figures are those of docs/policies.md."""
    pruner = fp.Pruner(1000, fp.RS2(20, save=0.37), batch_size=50)
    assert pruner.step_counts.num_kept(0) == 650


def test_it_needs_no_losses_and_stores_nothing():
    pruner = fp.Pruner(50, fp.RS2(4, 0.3))
    assert not pruner.policy.needs_losses
    assert pruner.state_dict()["learned"] == {}
