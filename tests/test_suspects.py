"""The order in which a policy says that labels should be checked."""

import numpy as np
import pytest
import torch

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.policies.epoch_losses import EpochLosses
from fineprune.pruning.policies.policy import LossRecords

WEIGHT = 0.2


def records(index, losses):
    losses = np.array(losses, np.float32)
    return LossRecords(np.array(index), losses, np.zeros(len(losses)))


def test_an_average_starts_with_the_first_loss_and_moves_with_each_epoch():
    smoothed = EpochLosses(3)
    assert smoothed.averages.isnan().all()
    expected: dict[int, float] = {}
    for epoch, losses in enumerate([[2.0, 1.0], [1.0, 3.0], [0.5, -2.0]]):
        index = [0, 2] if epoch != 1 else [0, 1]
        smoothed.observe(records(index, losses))
        smoothed.end_epoch()
        for sample, loss in zip(index, losses, strict=True):
            before = expected.get(sample, loss)
            expected[sample] = before + WEIGHT * (loss - before)
    values = smoothed.averages.tolist()
    assert values == pytest.approx([expected[0], expected[1], expected[2]], rel=1e-6)


def test_losses_that_are_not_finite_do_not_change_an_average():
    smoothed = EpochLosses(3)
    smoothed.observe(records([0, 1, 2], [1.0, np.nan, 1e9]))
    smoothed.end_epoch()
    smoothed.observe(records([0], [np.inf]))
    smoothed.end_epoch()
    values = smoothed.averages
    assert values[0] == 1
    assert values[1].isnan()
    assert values[2] == 1e9


def test_an_epoch_in_progress_is_part_of_the_state():
    smoothed, again = EpochLosses(2), EpochLosses(2)
    smoothed.observe(records([0], [3.0]))
    again.load_state_dict(smoothed.state_dict())
    for one in (smoothed, again):
        one.observe(records([1], [1.0]))
        one.end_epoch()
    assert torch.equal(smoothed.averages, again.averages)
    assert again.averages.tolist() == [3.0, 1.0]


def test_the_suspects_of_a_training_loop_are_the_samples_with_wrong_labels():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=generator)
    y = (x[:, 0] > 0).long()
    wrong = torch.arange(0, 400, 10)
    y[wrong] = 1 - y[wrong]
    model = torch.nn.Linear(8, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    pruner = fp.Pruner(400, fp.Adaptive(12, save=0.2, rates=[1] * 12), batch_size=20)
    for _ in pruner.epochs():
        for index in pruner.sampler.order().split(20):
            losses = torch.nn.functional.cross_entropy(model(x[index]), y[index], reduction="none")
            pruner.record(index, losses).backward()
            optimizer.step()
            optimizer.zero_grad()
    indices, scores = pruner.policy.suspects()
    assert len(indices) == len(scores) == len(indices.unique()) == 400
    assert (scores.diff() <= 0).all()
    assert torch.isin(indices[:30], wrong).float().mean() > 0.95


def test_samples_without_a_loss_are_not_listed():
    policy = fp.Adaptive(4, save=0)
    policy.bind(5)
    policy.bind_steps(1, 5)
    policy.observe(0, records([3, 1], [1.0, 2.0]))
    policy.end_epoch(0)
    indices, scores = policy.suspects()
    assert indices.tolist() == [1, 3]
    assert scores.tolist() == [2.0, 1.0]


def test_a_policy_that_learns_nothing_from_losses_says_so():
    with pytest.raises(InputError, match="got 'full', which suspects no samples"):
        fp.FullData(3).suspects()
