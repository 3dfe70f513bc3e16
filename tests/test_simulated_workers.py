"""Simulated workers: one equals plain training, N have a staleness of N - 1, resuming is exact."""

import pytest
import torch
from resuming import checkpoint_number, train_until
from torch import nn

from fineprune.distributed.simulated_workers import SimulatedWorkers
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe


def descend(workers, steps, rate=0.1, start=1.0):
    """Minimise p^2 / 2 with N simulated workers; return the values of p and each staleness."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, start)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    simulated = SimulatedWorkers(model, workers)
    simulated.begin_epoch()
    path, staleness = [], []
    for _ in range(steps):
        staleness.append(simulated.staleness)
        optimizer.zero_grad()
        (model.weight**2 / 2).sum().backward()
        simulated.step(optimizer)
        path.append(simulated.state_dict()["server"][0].item())
    simulated.end_epoch()
    assert model.weight.item() == path[-1]
    return path, staleness


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_gradients_are_as_stale_as_workers_that_take_turns_make_them(workers):
    path, staleness = descend(workers, 12)
    assert staleness == [min(step, workers - 1) for step in range(12)]
    # By hand: the gradient of p^2 / 2 is p, here the p of ``staleness`` updates ago.
    weights = [1.0]
    for step in range(12):
        weights.append(weights[-1] - 0.1 * weights[step - staleness[step]])
    assert path == pytest.approx(weights[1:], rel=1e-12)


def recipe(*changes):
    return make_recipe(
        {
            "data": {"name": "digits", "train_size": 256},
            "training": {"epochs": 3, "batch_size": 32, "lr": 0.02},
            "pruning": {"policy": "fine-pruning", "window": 2, "start": 1, "prune": 64},
            "run": {"threads": 1, "device": "cpu", "precision": "float32", "watch": 2},
        },
        changes,
    )


def weights(folder):
    state = load_checkpoint(folder / "checkpoint.pt")["model"]
    return torch.cat([value.flatten() for value in state.values()])


def test_one_worker_is_plain_training_bit_for_bit_and_more_are_not(tmp_path):
    for name, workers in (("plain", 0), ("one", 1), ("four", 4)):
        train(recipe(f"distributed.simulate={workers}"), tmp_path / name)
    assert torch.equal(weights(tmp_path / "plain"), weights(tmp_path / "one"))
    assert not torch.equal(weights(tmp_path / "plain"), weights(tmp_path / "four"))


@pytest.mark.parametrize("saves", [3, 9, 13])
def test_a_run_stopped_inside_an_epoch_ends_as_if_it_never_was(saves, tmp_path, monkeypatch):
    made = recipe("distributed.simulate=3", "run.checkpoint_steps=1")
    train(made, tmp_path / "whole")
    train_until(checkpoint_number(saves), made, tmp_path / "run", monkeypatch)
    train(made, tmp_path / "run", resume=True)
    assert torch.equal(weights(tmp_path / "whole"), weights(tmp_path / "run"))


def test_fewer_than_one_worker_is_refused():
    with pytest.raises(ValueError, match="at least one simulated worker"):
        SimulatedWorkers(nn.Linear(1, 1), 0)
    with pytest.raises(ValueError, match=r"distributed\.simulate"):
        recipe("distributed.simulate=-1")
