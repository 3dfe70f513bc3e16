"""What is known of the epoch in progress, and what its result is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey, BatchLedger
from fineprune.errors import InputError


@dataclass(frozen=True)
class Update:
    """One update of the parameters.

    Attributes:
        version: The version that it made.
        keys: Its batches, sorted.
        staleness: The staleness of its gradients, which is the same for all of them.
        indices: The indices of its samples, int64, shape (B,), batch after batch.
        losses: The losses of its samples, float32, shape (B,), at the parameters that its workers
            had read.
    """

    version: int
    keys: tuple[BatchKey, ...]
    staleness: int
    indices: Tensor
    losses: Tensor


@dataclass
class EpochResult:
    """What became of an epoch.

    Attributes:
        updates: The updates, in the order of their first batches. Record the indices and losses of
            each as one batch, in this order: with ``sync`` and no backup workers it does not depend
            on the workers' speed.
        lost: The batches whose gradients were lost with a server; they are in no update.
        applied: The number of the epoch's batches that are done: exactly its first ones, with those
            before the epoch was resumed, and with those that are lost.
        finished: Whether these are all batches of the epoch.
        staleness: The staleness of each update, in the order in which they were applied.
        dropped: The number of gradients that were discarded because they came too late.
        undone: The number of updates that a server's death undid. Their batches were queued again,
            or are lost.
        worker_deaths, server_deaths: The number of processes that died, or were killed because they
            were silent for too long. A death that is noticed between two epochs is added to the
            result of the earlier one.
        seconds: Sums over all processes: data, compute, group reduce (on CPUs; what the backward
            pass did not hide), push, pull and wait (between two calls) of the workers; queue, apply
            and send of the servers. pull includes the servers' queue, apply and send for the same
            request.
    """

    updates: list[Update] = field(default_factory=list)
    lost: list[BatchKey] = field(default_factory=list)
    applied: int = 0
    finished: bool = False
    staleness: list[int] = field(default_factory=list)
    dropped: int = 0
    undone: int = 0
    worker_deaths: int = 0
    server_deaths: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class EpochState:
    """The epoch in progress: its batches, who has them, and the updates that they made.

    Args:
        epoch: The epoch, from 0.
        batches: The indices of each batch's samples, int64, on the CPU.
        rate: Returns the learning rate, given the number of the epoch's batches applied so far.
        version: The version of the parameters now.
        applied: The number of its batches that were applied before it was interrupted.
        stop: Returns whether to stop early.

    Attributes:
        ledger: Who has which batch.
        result: The counts so far; ``finish`` adds the rest.

    Raises:
        InputError: A batch is empty, or more batches are applied than there are.
    """

    def __init__(
        self,
        epoch: int,
        batches: Sequence[Tensor],
        rate: Callable[[int], float],
        version: int,
        applied: int = 0,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        if not 0 <= applied <= len(batches):
            raise InputError(f"expected 0 to {len(batches)} applied batches, got {applied}")
        self._batches = [np.asarray(batch.numpy(), dtype=np.int64) for batch in batches]
        if not all(len(batch) for batch in self._batches[applied:]):
            raise InputError("expected batches of at least one sample, got an empty one")
        self._applied = applied
        self._rate = rate
        self._first_version = version
        self._stop = stop
        self._stopping = False
        self._updates: dict[int, Update] = {}
        self.ledger = BatchLedger(epoch, len(batches), applied)
        self.result = EpochResult()

    def indices(self, key: BatchKey) -> np.ndarray[Any, Any]:
        """Return the indices of a batch's samples, int64, shape (B,)."""
        return self._batches[key.batch]

    def rate(self) -> float:
        """Return the learning rate of the next update."""
        return self._rate(self._applied + len(self.ledger.applied))

    def updates_since_start(self, version: int) -> int:
        """Return how many updates lie between a version and the one that this began with."""
        return version - self._first_version

    def apply(
        self,
        version: int,
        staleness: int,
        losses: Mapping[BatchKey, np.ndarray[Any, np.dtype[np.float32]]],
    ) -> dict[BatchKey, float]:
        """Note an update of staged gradients.

        Args:
            version: The version that it makes.
            staleness: The staleness of its gradients.
            losses: The losses of each batch, float32, shape (B,).

        Returns:
            The share of each batch in the mean gradient, in the order of the keys: in proportion
            to its samples.
        """
        keys = sorted(losses)
        self.ledger.apply(keys)
        indices = [self.indices(key) for key in keys]
        self._updates[version] = Update(
            version,
            tuple(keys),
            staleness,
            torch.from_numpy(np.concatenate(indices)),
            torch.from_numpy(np.concatenate([losses[key] for key in keys])),
        )
        samples = sum(map(len, indices))
        return {key: len(part) / samples for key, part in zip(keys, indices, strict=True)}

    def should_stop(self) -> bool:
        """Return whether the epoch is to stop early; once it is, it always is."""
        self._stopping = self._stopping or (self._stop is not None and self._stop())
        return self._stopping

    def undo(self, version: int, *, lose: bool) -> int:
        """Note that the updates after a version are undone.

        Args:
            version: The version that the parameters went back to.
            lose: Whether the batches of these updates are lost; otherwise they are queued again.

        Returns:
            The number of these batches.
        """
        undone = [self._updates.pop(one) for one in list(self._updates) if one > version]
        keys = [key for update in undone for key in update.keys]
        self.ledger.undo(keys, lose=lose)
        self.result.undone += len(undone)
        return len(keys)

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Add to the sums of seconds by phase."""
        for phase, value in seconds.items():
            self.result.seconds[phase] = self.result.seconds.get(phase, 0.0) + value

    def finish(self) -> EpochResult:
        """Return the result with everything in it."""
        in_order = [self._updates[version] for version in sorted(self._updates)]
        self.result.staleness = [update.staleness for update in in_order]
        self.result.updates = sorted(in_order, key=lambda update: update.keys[0])
        self.result.lost = self.ledger.lost
        self.result.applied = self.ledger.done
        self.result.finished = self.ledger.done == self.ledger.batches
        return self.result
