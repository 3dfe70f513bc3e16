"""Trainings that are stopped: of a pruner with made-up losses, and of a recipe."""

import io

import numpy as np
import pytest
import torch

from fineprune.errors import InputError
from fineprune.training.checkpoint import save_checkpoint
from fineprune.training.trainer import train


def falling_losses(number):
    """Return made-up losses of so many samples, as a function of the epoch and the indices.

    Most of them fall with the epochs, and all of them differ.
    """

    def losses_of(epoch, index):
        rng = np.random.default_rng(epoch)
        losses = rng.exponential(2 / (1 + epoch / 2), number) + (rng.random(number) < 0.1) * 3
        return torch.from_numpy(losses.astype(np.float32))[index]

    return losses_of


def whole_losses(epoch, indices):
    """Return made-up losses that are whole numbers, so that their sums are exact in any order."""
    return ((indices * 37 + epoch * 11) % 17).float()


def refusal(call, *arguments):
    """Return the message with which a call is refused; None if it is not."""
    try:
        call(*arguments)
    except InputError as error:
        return str(error)


def saved(pruner):
    """Return the state of a pruner as the bytes of a file."""
    file = io.BytesIO()
    torch.save(pruner.state_dict(), file)
    return file.getvalue()


def train_pruner(pruner, losses_of, *, batch=5, stop=None):
    """Train with made-up losses.

    Args:
        pruner: The pruner. Its own batch size has precedence over ``batch``.
        losses_of: Returns the losses of an epoch's samples with the given indices.
        batch: The number of samples per batch.
        stop: The number of the epoch, and that of its batch, at which to stop.

    Returns:
        The kept samples of each epoch with their weights, or None as the weights, and the state at
        the stop.
    """
    batch = pruner.shape.batch_size or batch
    plans: list[tuple[list[int], list[float] | None]] = []
    for epoch in pruner.epochs():
        for number, index in enumerate(pruner.sampler.order().split(batch)):
            if (epoch, number) == stop:
                return plans, pruner.state_dict()
            if not len(index):  # All batches were trained before the state was taken.
                break
            parameter = torch.ones((), requires_grad=True)
            pruner.record(index, losses_of(epoch, index) * parameter).backward()
        weights = pruner.plan.weights
        kept = pruner.plan.kept
        plans.append((kept.tolist(), None if weights is None else weights[kept].tolist()))
    return plans, None


def assert_plans(plans, expected):
    """Check plans that ``train_pruner`` returned against weights of samples, for each epoch."""
    for (kept, weights), weight_of in zip(plans, expected, strict=True):
        assert kept == sorted(weight_of)
        assert (weights or [1.0] * len(kept)) == pytest.approx([weight_of[one] for one in kept])


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
        patched.setattr("fineprune.training.trainer.save_checkpoint", save_and_stop)
        with pytest.raises(Stop):
            train(recipe, folder)
