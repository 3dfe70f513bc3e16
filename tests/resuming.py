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


def train_through(epoch, recipe, folder):
    """Train a recipe, and stop it right after the epoch (counted from 0)."""

    def stop(metrics):
        if metrics["epoch"] == epoch:
            raise Stop

    with pytest.raises(Stop):
        train(recipe, folder, on_epoch=stop)


def checkpoint_number(number, *, inside=False):
    """Return a condition for ``train_until``: this many checkpoints were written.

    Args:
        number: The number of checkpoints.
        inside: Whether to count only checkpoints that were not written at the end of an epoch.
    """
    written = []

    def is_it(state):
        if not inside or state["epoch_so_far"] is not None:
            written.append(state)
        return len(written) == number

    return is_it


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
