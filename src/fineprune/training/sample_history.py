"""SampleHistory: the loss and the prediction of each sample that the epoch in progress trains.

They come from the training pass itself, so nothing is computed twice. ``fineprune inspect`` reads
them from the run's folder (``runs.history``).
"""

import torch

from fineprune.distributed.all_reduce import RankGroup

# Batches are collected until there are this many, because each store has a fixed cost.
_STORE_AT = 64

NO_PREDICTION = -1


class SampleHistory:
    """One loss and one prediction per sample, on the device of the training: six bytes.

    A sample that is trained twice in an epoch has the values of its last visit. Losses are stored
    in half precision; a loss that is not finite, or too large for it, is stored as infinity.
    """

    def __init__(self, num_samples: int, device: str) -> None:
        self._losses = torch.full((num_samples,), -torch.inf, dtype=torch.float16, device=device)
        self._predictions = torch.full(
            (num_samples,), NO_PREDICTION, dtype=torch.int32, device=device
        )
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(
        self, index: torch.Tensor, losses: torch.Tensor, logits: torch.Tensor | None = None
    ) -> None:
        """Add a batch, which must not be changed afterwards.

        Args:
            index: The indices of the samples; int64, shape (B,).
            losses: Their losses; float32, shape (B,).
            logits: The outputs of the network; floating point, shape (B, classes). None if they
                are not known here.
        """
        if logits is None:
            predictions = torch.full_like(index, NO_PREDICTION)
        else:
            predictions = logits.detach().argmax(1)
        self._waiting.append((index, losses.detach(), predictions))
        if len(self._waiting) == _STORE_AT:
            self._store()

    def merged(self, ranks: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values of all ranks. Every rank must call it.

        Returns:
            The losses, float16, shape (N,), -inf for a sample that was not trained; and the
            predicted classes, int32, shape (N,), -1 for a sample without one. Both on the CPU.
        """
        self._store()
        return ranks.maximum(self._losses).cpu(), ranks.maximum(self._predictions).cpu()

    def load(self, losses: torch.Tensor, predictions: torch.Tensor) -> None:
        """Continue an epoch from the values that ``merged`` returned."""
        self._losses.copy_(losses)
        self._predictions.copy_(predictions)

    def _store(self) -> None:
        if not self._waiting:
            return
        device = self._losses.device
        indices, losses, predictions = zip(*self._waiting, strict=True)
        index = torch.cat(indices).to(device, non_blocking=True)
        half = torch.cat(losses).half()
        self._losses[index] = torch.where(half.isfinite(), half, torch.inf)
        self._predictions[index] = torch.cat(predictions).to(device).int()
        self._waiting = []
