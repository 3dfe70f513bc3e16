"""The order in which a policy says that labels should be checked."""

import torch

import fineprune as fp


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
    scores = pruner.policy.suspicion()
    assert scores is not None
    assert scores.shape == (400,)
    assert torch.isin(scores.topk(30).indices, wrong).float().mean() > 0.95


def test_a_policy_that_learns_nothing_suspects_nothing():
    assert fp.FullData(3).suspicion() is None
