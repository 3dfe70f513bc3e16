"""Simulated workers: one equals plain training, N have a staleness of N - 1, resuming is exact."""

import re

import pytest
import torch
from resuming import small_recipe, weights
from torch import nn

from fineprune.distributed.simulated_workers import SimulatedWorkers
from fineprune.runs.files import read_metrics
from fineprune.training.trainer import train


def descend(steps, workers, epoch=0, **options):
    """Minimise p^2 / 2 with simulated workers; return the values of p."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    simulated = SimulatedWorkers(model, workers, **options)
    simulated.begin_epoch(epoch)
    path = []
    for _ in range(steps):
        optimizer.zero_grad()
        (model.weight**2 / 2).sum().backward()
        simulated.step(optimizer)
        path.append(simulated.state_dict()["server"][0].item())
    simulated.end_epoch()
    assert model.weight.item() == path[-1]
    return path


def by_hand(staleness):
    """The gradient of p^2 / 2 is p, here the p of ``staleness`` updates ago."""
    weights = [1.0]
    for step, behind in enumerate(staleness):
        weights.append(weights[-1] - 0.1 * weights[step - behind])
    return pytest.approx(weights[1:], rel=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_gradients_are_as_stale_as_workers_that_take_turns_make_them(workers):
    assert descend(12, workers) == by_hand([min(step, workers - 1) for step in range(12)])


@pytest.mark.parametrize(
    ("bound", "staleness"),
    [
        (None, [0, 1, 1, 1, 1, 1, 6, 2, 2, 1, 1, 1, 1, 1, 1]),
        # The others wait for it before their third update.
        (2, [0, 1, 2, 2, 2] * 3),
    ],
)
def test_a_slow_worker_is_stale_unless_the_others_wait_for_it(bound, staleness):
    """Without a bound, it ends at 3.5 and 7; the others at 1, 2, 3 and so on, the first first."""
    assert descend(15, 3, seconds=(1.0, 1.0, 3.5), bound=bound) == by_hand(staleness)


def test_durations_with_a_spread_are_drawn_from_the_seed_and_the_epoch():
    paths = [
        descend(40, 4, epoch, spread=0.5, seed=seed) for seed, epoch in ((1, 0), (2, 0), (1, 1))
    ]
    assert paths[0] == descend(40, 4, spread=0.5, seed=1)
    assert len(set(map(tuple, paths))) == 3


def recipe(*changes):
    return small_recipe("training.epochs=3", "training.batch_size=32", *changes)


def test_one_worker_is_plain_training_bit_for_bit_and_more_are_not(tmp_path):
    for name, workers in (("plain", 0), ("one", 1), ("four", 4)):
        train(recipe(f"distributed.simulate={workers}"), tmp_path / name)
    assert torch.equal(weights(tmp_path / "plain"), weights(tmp_path / "one"))
    assert not torch.equal(weights(tmp_path / "plain"), weights(tmp_path / "four"))


def test_synchronous_workers_are_one_process_with_a_larger_batch(tmp_path):
    train(recipe("training.batch_size=128", "pruning.policy=full"), tmp_path / "one")
    sync = ["pruning.policy=full", "distributed.simulate_as=sync"]
    for name, more in (
        ("sync", ["distributed.simulate=4"]),
        ("backup", ["distributed.simulate=5", "distributed.backup=1"]),
    ):
        train(recipe(*sync, *more), tmp_path / name)
        torch.testing.assert_close(weights(tmp_path / name), weights(tmp_path / "one"))
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [line["steps"] for line in lines] == [2, 2, 2]


def test_the_rate_of_synchronous_workers_follows_the_updates(tmp_path):
    """Seven batches of two workers are four updates, the last of which has one batch."""
    cosine = ["data.train_size=224", "training.schedule=cosine", "pruning.policy=full"]
    train(recipe(*cosine, "training.batch_size=64"), tmp_path / "one")
    two = "distributed.simulate=2", "distributed.simulate_as=sync"
    train(recipe(*cosine, *two), tmp_path / "two")
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"))
    one, two_lines = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("lr", "steps"):
        assert [line[name] for line in two_lines] == [line[name] for line in one]


def test_groups_are_workers_with_larger_batches(tmp_path):
    full = "pruning.policy=full"
    pairs = "training.batch_size=64", "distributed.simulate=2"
    train(recipe(full, *pairs), tmp_path / "async")
    mixed = "distributed.simulate=4", "distributed.simulate_as=mixed", "distributed.group=2"
    train(recipe(full, *mixed), tmp_path / "mixed")
    torch.testing.assert_close(weights(tmp_path / "mixed"), weights(tmp_path / "async"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["simulate_as=none"], "distributed.simulate_as to be one of"),
        (["backup=1"], "expected distributed.backup with strategy sync only, got it with 'async'"),
        (["group=2"], "expected distributed.group with strategy mixed only"),
        (["simulate_as=mixed", "group=3"], "distributed.simulate to be a multiple of"),
        (["simulate_as=sync", "backup=4"], "distributed.backup below distributed.simulate"),
        (["step_seconds=[1.0, 2.0]"], "step_seconds to have 4 numbers"),
        (["step_seconds=[1.0, 2.0, 0.0, 1.0]"], "distributed.step_seconds"),
        (["simulate_as=sync", "step_spread=0.1"], "step_spread with simulate_as async or mixed"),
        (["simulate=-1"], "distributed.simulate"),
        (["simulate=0", "step_spread=0.1"], "step_spread with simulate_as async or mixed only"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe("distributed.simulate=4", *(f"distributed.{change}" for change in changes))
