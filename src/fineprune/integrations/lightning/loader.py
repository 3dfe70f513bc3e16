"""The user's training loader with the samples of the plan."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from fineprune.pruning.indexed import IndexedCollate
from fineprune.pruning.pruner import Pruner

# What the user's loader keeps.
_KEPT = [
    "batch_size",
    "num_workers",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
]


class PrunedLoader(DataLoader[Any]):
    """The user's loader with the samples of the plan. Its batches are those of the user.

    Lightning makes an iterator for each epoch and another one before, and uses only one of them.
    Workers are started and random numbers are drawn when the first batch is asked for.

    Attributes:
        index: The indices of the last batch, int64, shape (B,); None if they were recorded.
        shows_all: Whether the length is that of an epoch on all samples, as before the training.
    """

    def __init__(self, loader: DataLoader[Any], pruner: Pruner) -> None:
        options = {name: getattr(loader, name) for name in _KEPT}
        collate_fn = IndexedCollate(loader.collate_fn)
        super().__init__(pruner.dataset, sampler=pruner.sampler, collate_fn=collate_fn, **options)
        self.index: torch.Tensor | None = None
        self.shows_all = True
        self._all = pruner.shape.batches_of(pruner.num_samples)

    def __iter__(self) -> Any:
        # This is a generator, so the iterator of the loader is made at the first batch.
        for index, batch in super().__iter__():
            self.index = index
            yield batch

    def __len__(self) -> int:
        return self._all if self.shows_all else super().__len__()

    # With these two methods, Lightning does not warn that a resumed run repeats batches.
    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is in the state of the pruner."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the position is in the state of the pruner."""
