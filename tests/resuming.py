"""Trainings that are stopped: of a pruner, and of a recipe."""

import pytest
import torch

from fineprune.training.checkpoint import save_checkpoint
from fineprune.training.loop import train


def stopped_and_resumed(made, train, stop, folder):
    """Return the plans of both parts of a training.

    Args:
        made: Makes the pruner, once for each part.
        train: Trains a pruner, up to the point ``stop`` if it is given; returns the plans and a
            state that was taken there.
        stop: The point at which the first part ends.
        folder: The folder to which the state is saved.
    """
    before, state = train(made(), stop=stop)
    torch.save(state, folder / "state.pt")
    again = made()
    again.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    after, _ = train(again)
    return before + after


class Stop(Exception):
    """Ends a training."""


def train_until(when, recipe, folder, monkeypatch):
    """Train a recipe up to the first checkpoint whose state fulfils ``when``, which is written."""

    def save_and_stop(path, state):
        save_checkpoint(path, state)
        if when(state):
            raise Stop

    with monkeypatch.context() as patched:
        patched.setattr("fineprune.training.loop.save_checkpoint", save_and_stop)
        with pytest.raises(Stop):
            train(recipe, folder)
