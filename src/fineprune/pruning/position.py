"""Position: where a training is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Where one rank is in its training.

    Attributes:
        epoch: The epoch in progress, counted from 0; if it has ended, the next one. At the end of
            the training, it is the number of epochs.
        batches: Number of batches that this rank has recorded in this epoch.
        samples: Number of samples that this rank has recorded in this epoch.
    """

    epoch: int
    batches: int
    samples: int
