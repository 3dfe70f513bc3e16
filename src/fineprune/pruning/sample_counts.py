"""SampleCounts: the DroppingCounts of some samples, and the marks of the epoch in progress."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.pruning.dropping_count import Counts, add_marks, counts_dtype


class SampleCounts:
    """One count and one mark per sample: two bytes, if no window is longer than 255 epochs.

    Args:
        num_samples: Number of samples n.
        longest_window: Number of epochs over which counts are added up at most.

    Attributes:
        counts: The counts as of the last epoch that ended; integers, shape (n,).
        marks: The samples that the epoch in progress marked; bool, shape (n,).
    """

    def __init__(self, num_samples: int, longest_window: int) -> None:
        self.counts: Counts = np.zeros(num_samples, dtype=counts_dtype(longest_window))
        self.marks: npt.NDArray[np.bool_] = np.zeros(num_samples, dtype=np.bool_)

    def end_epoch(self, clear: bool) -> None:
        """Clear the counts if ``clear`` is set, then add the marks of the epoch."""
        if clear:
            self.counts[:] = 0
        add_marks(self.counts, self.marks)
        self.marks[:] = False

    def copied(self) -> torch.Tensor:
        """Return a copy of the counts, shape (n,)."""
        return torch.from_numpy(self.counts.copy())

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the marks of an epoch in progress as packed bits."""
        return {"counts": self.copied(), "marks": torch.from_numpy(np.packbits(self.marks))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts and the marks."""
        self.counts = state["counts"].numpy().copy()
        marks = np.unpackbits(state["marks"].numpy(), count=len(self.counts))
        self.marks = marks.view(np.bool_)
