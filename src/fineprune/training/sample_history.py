"""SampleHistory: the loss of each sample that the epoch in progress trains.

It comes from the training pass itself, so nothing is computed twice. ``fineprune inspect`` reads it
from the run's folder (``runs.history``).
"""

import torch

from fineprune.distributed.all_reduce import RankGroup

# Batches are collected until there are this many, because each store has a fixed cost.
_STORE_AT = 64


class SampleHistory:
    """One loss per sample, in half precision, on the device of the training.

    A sample that is trained twice in an epoch has the loss of its last visit. A loss that is not
    finite, or too large for half precision, is stored as infinity.
    """

    def __init__(self, num_samples: int, device: str) -> None:
        self._losses = torch.full((num_samples,), -torch.inf, dtype=torch.float16, device=device)
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, index: torch.Tensor, losses: torch.Tensor) -> None:
        """Add a batch, which must not be changed afterwards.

        Args:
            index: The indices of the samples; int64, shape (B,).
            losses: Their losses; float32, shape (B,).
        """
        self._waiting.append((index, losses.detach()))
        if len(self._waiting) == _STORE_AT:
            self._store()

    def merged(self, ranks: RankGroup) -> torch.Tensor:
        """Return the losses of all ranks; float16, shape (N,), on the CPU. A collective.

        A sample that was not trained has -inf.
        """
        self._store()
        return ranks.maximum(self._losses).cpu()

    def load(self, losses: torch.Tensor) -> None:
        """Continue an epoch from what ``merged`` returned."""
        self._losses.copy_(losses)

    def _store(self) -> None:
        if not self._waiting:
            return
        indices, losses = zip(*self._waiting, strict=True)
        index = torch.cat(indices).to(self._losses.device, non_blocking=True)
        half = torch.cat(losses).to(self._losses.device, non_blocking=True).half()
        self._losses[index] = torch.where(half.isfinite(), half, torch.inf)
        self._waiting = []
