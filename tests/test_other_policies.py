"""SelectiveBackprop, SeTa and epsilon-greedy, each compared with its rule written out."""

from typing import Any

import numpy as np
import pytest
import torch
from resuming import train_pruner

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.policies.seta import clusters

N, BATCH, EPOCHS = 200, 10, 10


def losses_of(epoch, index):
    noise = np.random.default_rng(epoch).random(N, dtype=np.float32)
    return torch.from_numpy(noise + np.arange(N, dtype=np.float32) / 50)[index]


def train(policy, seed=0):
    """Train with made-up losses, and return the kept samples of each epoch."""
    pruner = fp.Pruner(N, policy, batch_size=BATCH, seed=seed)
    return [np.array(kept) for kept, _ in train_pruner(pruner, losses_of)[0]]


def test_selective_backprop_prefers_large_losses_between_start_and_end():
    kept = train(fp.SelectiveBackprop(EPOCHS, save=0.2))
    lengths = [len(part) for part in kept]
    assert lengths == [N] * 5 + [100] * 4 + [N]
    for part in kept[5:9]:
        assert part.mean() > N / 2 + 10  # The loss grows with the index.


def test_the_power_of_selective_backprop_gives_the_probabilities_of_a_draw():
    """With one sample to keep, its probability is in proportion to its percentile."""
    policy = fp.SelectiveBackprop(2, save=0.4, begin=0.5, end=1, power=2)
    policy.bind(4)
    policy.losses[:] = [0.1, 0.2, 0.3, np.nan]
    rng = np.random.default_rng(0)
    drawn = np.bincount([int(policy.select(1, 1, rng).kept[0]) for _ in range(4000)], minlength=4)
    expected = np.array([1, 4, 9, 16]) / 30
    assert np.abs(drawn / 4000 - expected).max() < 0.03


def test_seta_moves_a_window_over_groups_from_easy_to_hard():
    policy = fp.SeTa(EPOCHS, prune=0.0, groups=4, width=0.5, final=0.1)
    kept = train(policy)
    assert len(kept[0]) == len(kept[9]) == N
    means = [part.mean() for part in kept[1:9]]
    # Four groups and a window of two have three places: 1, 2, 0, 1, 2, 0, 1, 2.
    for place in range(2):
        assert means[place + 2] < means[place] < means[place + 1] or place
    assert np.argsort(means[:3]).tolist() == [2, 0, 1]
    assert all(len(part) % BATCH == 0 for part in kept)


def test_seta_drops_a_random_part_first():
    kept = train(fp.SeTa(EPOCHS, prune=0.5, groups=1, final=0.0))
    assert [len(part) for part in kept] == [100] * EPOCHS
    assert len({tuple(part) for part in kept}) == EPOCHS


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_clusters_are_those_of_k_means(number):
    """In one dimension, Lloyd's algorithm on all points, from the same centres."""
    losses = np.random.default_rng(number).gamma(1.0, size=300).astype(np.float32)
    points = np.sort(losses.astype(np.float64))
    centres = points[(np.arange(number) * 2 + 1) * len(points) // (2 * number)]
    for _ in range(200):
        nearest = np.abs(losses[:, None].astype(np.float64) - centres).argmin(1)
        centres = np.array([losses[nearest == k].mean(dtype=np.float64) for k in range(number)])
    assert np.array_equal(clusters(losses, number), nearest)


def test_unknown_losses_are_hard():
    assert clusters(np.array([np.nan, 0.0, 1.0], np.float32), 2).tolist() == [1, 0, 1]
    assert clusters(np.full(3, np.nan, np.float32), 3).tolist() == [2, 2, 2]
    assert set(clusters(np.zeros(5, np.float32), 4).tolist()) <= set(range(4))


@pytest.mark.parametrize("epsilon", [0.0, 0.25, 1.0])
def test_epsilon_greedy_replaces_a_share_of_the_best_by_others(epsilon):
    greedy = train(fp.UCB(EPOCHS, save=0.3, exploration=0.0))
    mixed = train(fp.UCB(EPOCHS, save=0.3, exploration=0.0, epsilon=epsilon))
    best = set(greedy[1].tolist())
    others = len(set(mixed[1].tolist()) - best)
    assert len(mixed[1]) == len(best)
    # Some of those that are chosen at random would have been among the best.
    assert (0 < others <= int(epsilon * len(best))) if epsilon else others == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp.SelectiveBackprop(10, begin=0.9, end=0.5), "0 <= begin < end <= 1"),
        (lambda: fp.SelectiveBackprop(10, power=-1), "power of at least 0"),
        (
            lambda: fp.SelectiveBackprop(10, save=0.5),
            r"save below 0\.4.*let more epochs skip samples",
        ),
        (lambda: fp.SeTa(10, prune=1.0), r"prune as a share in \[0, 1\)"),
        (lambda: fp.SeTa(10, width=0.0), "width as a share"),
        (lambda: fp.SeTa(10, groups=0), "groups"),
        (lambda: fp.SeTa(10, final=2.0), "final"),
        (lambda: fp.UCB(10, epsilon=1.5), "epsilon"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("anneal", [0.0, 0.2, 0.3])
def test_selective_backprop_saves_as_much_beside_annealed_epochs(anneal):
    pruner = fp.Pruner(1000, fp.SelectiveBackprop(20, save=0.15, anneal=anneal), batch_size=10)
    assert pruner.summary()["predicted_saving"] == pytest.approx(0.15, abs=0.001)


def test_selective_backprop_refuses_to_anneal_the_epochs_that_save():
    with pytest.raises(InputError):
        fp.SelectiveBackprop(20, save=0.2, anneal=0.5)


def test_the_last_epoch_is_full_if_the_number_of_epochs_is_one_of_numpy():
    epochs: Any = np.int64(10)
    assert fp.ProgressiveDropout(epochs).plan_options.anneal == 0.1
