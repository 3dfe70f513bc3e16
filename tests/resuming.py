"""A training of a pruner that is stopped, and continued from its saved state."""

import torch


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
