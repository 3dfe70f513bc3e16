"""The order in which a policy says that labels should be checked."""

import pytest
import torch

import fineprune as fp
from fineprune.errors import InputError


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
            logits = model(x[index])
            losses = torch.nn.functional.cross_entropy(logits, y[index], reduction="none")
            pruner.record(index, losses, logits, y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
    indices, scores = pruner.policy.suspects()
    assert len(indices) == len(scores) == len(indices.unique()) == 400
    assert (scores.diff() <= 0).all()
    assert torch.isin(indices[:30], wrong).float().mean() > 0.95


def test_a_policy_that_learns_nothing_from_losses_says_so():
    with pytest.raises(InputError, match="got 'full', which suspects no samples"):
        fp.FullData(3).suspects()
