"""Loads batches before they are needed, while the previous batch is computed."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fineprune.distributed.parameter_servers.batches import BatchKey


class Prefetch:
    """Loads at most two batches at a time: the one that is needed now, and the next one.

    Args:
        load: Function that loads a batch; see ``Replica.load``.
        overlaps: Whether it may be called during a step, in a thread of its own. Otherwise, batches
            are loaded when they are needed.
    """

    def __init__(self, load: Callable[[BatchKey, Tensor], Any], *, overlaps: bool) -> None:
        self._load = load
        self._thread = ThreadPoolExecutor(1, "load") if overlaps else None
        self._begun: dict[BatchKey, Future[Any]] = {}

    def begin(self, wanted: Mapping[BatchKey, Any]) -> None:
        """Begin to load batches that are not loaded yet, and drop all others.

        Args:
            wanted: The indices of the samples of each batch, int64, shape (B,), in the order in
                which the batches are needed.
        """
        for key in self._begun.keys() - wanted.keys():
            self._begun.pop(key).cancel()
        if self._thread is not None:
            for key, indices in wanted.items():
                if key not in self._begun:
                    self._begun[key] = self._thread.submit(self._load, key, torch.tensor(indices))

    def take(self, key: BatchKey, indices: Any) -> Any:
        """Return a batch, and wait for it if necessary."""
        begun = self._begun.pop(key, None)
        return self._load(key, torch.tensor(indices)) if begun is None else begun.result()
