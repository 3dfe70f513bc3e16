"""The state of the epoch in progress, and the result of an epoch."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fineprune.distributed.parameter_servers.batch_ledger import BatchKey, BatchLedger
from fineprune.distributed.parameter_servers.events import ProcessKind
from fineprune.distributed.parameter_servers.messages import Array, Arrays
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError


@dataclass(frozen=True)
class Update:
    """One update of the parameters.

    Attributes:
        version: The version of the parameters that the update made.
        keys: The batches of the update, sorted.
        groups: The index of the group that computed the gradient of each batch.
        staleness: The staleness of the gradients, which is the same for all of them.
        indices: The indices of the samples, int64, shape (B,), batch after batch.
        losses: The losses of the samples, float32, shape (B,), computed with the parameters that
            the workers had read.
        watched: What the replica returned besides, by names: tensors with one row per sample.
    """

    version: int
    keys: tuple[BatchKey, ...]
    groups: tuple[int, ...]
    staleness: int
    indices: Tensor
    losses: Tensor
    watched: dict[str, Tensor]


@dataclass
class WorkerTotals:
    """What one worker did in an epoch.

    Attributes:
        samples: The number of its samples in the updates.
        staleness: The staleness of each update with a gradient of its group.
        seconds: The duration of each phase: data (the wait for a batch that is being loaded),
            compute, group reduce (on CPUs, the part that does not overlap with the backward pass),
            push, pull and wait (the time between two steps).
    """

    samples: int = 0
    staleness: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class EpochResult:
    """The result of an epoch, or of the part of it that was trained before a stop.

    Attributes:
        updates: The updates, in the order of their first batches. Record the indices and losses of
            each update as one batch, in this order. With ``sync`` and no backup workers, the order
            does not depend on the speed of the workers.
        lost: The batches whose gradients were lost with a server. They are in no update.
        applied: The number of batches that are applied or lost, including those before the epoch
            was resumed. They are exactly the first batches of the epoch.
        finished: Whether these are all batches of the epoch.
        staleness: The staleness of each update, in the order in which they were applied.
        dropped: The number of gradients that were discarded because they came too late.
        undone: The number of updates that were undone because a server died. Their batches were
            queued again, or are lost.
        workers: What each worker did, by rank.
        servers: The duration of each phase of each server: apply (the mean of the gradients and the
            step of the optimizer) and send (the copies for the groups). They take place while
            groups wait and pull.
    """

    updates: list[Update] = field(default_factory=list)
    lost: list[BatchKey] = field(default_factory=list)
    applied: int = 0
    finished: bool = False
    staleness: list[int] = field(default_factory=list)
    dropped: int = 0
    undone: int = 0
    workers: list[WorkerTotals] = field(default_factory=list)
    servers: list[dict[str, float]] = field(default_factory=list)

    @property
    def seconds(self) -> dict[str, float]:
        """The durations of the phases, summed over all processes."""
        total: Counter[str] = Counter()
        for seconds in (*(worker.seconds for worker in self.workers), *self.servers):
            total.update(seconds)
        return dict(total)


class EpochState:
    """The epoch in progress: its batches, the groups that hold them, and the updates so far.

    Args:
        epoch, batches, weights, rate, applied, stop: As for ``Coordinator.run_epoch``.
        strategy: The strategy, which says how many workers and servers there are.

    Attributes:
        ledger: The state of each batch.
        result: The counts so far; ``finish`` adds everything else.
    """

    def __init__(
        self,
        epoch: int,
        batches: Sequence[Tensor],
        weights: Tensor | None,
        rate: Callable[[int], float],
        strategy: Strategy,
        applied: int = 0,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        if not 0 <= applied <= len(batches):
            raise InputError(f"expected 0 to {len(batches)} applied batches, got {applied}")
        self._batches = [np.asarray(batch.numpy(), dtype=np.int64) for batch in batches]
        if not all(len(batch) for batch in self._batches[applied:]):
            raise InputError("expected batches of at least one sample, got an empty one")
        self._weights = None if weights is None else weights.numpy()
        self._applied = applied
        self._rate = rate
        self._stop = stop
        self._stopping = False
        self._updates: dict[int, Update] = {}
        self.ledger = BatchLedger(epoch, len(batches), applied)
        self._group_size = strategy.group
        self.result = EpochResult(
            workers=[WorkerTotals() for _ in range(strategy.workers)],
            servers=[{} for _ in range(strategy.servers)],
        )

    def indices(self, key: BatchKey) -> np.ndarray[Any, Any]:
        """Return the indices of a batch's samples, int64, shape (B,)."""
        return self._batches[key.batch]

    def weights(self, key: BatchKey) -> np.ndarray[Any, Any] | None:
        """Return the weights of a batch's losses, float32, shape (B,); None if they are equal."""
        return None if self._weights is None else self._weights[self.indices(key)]

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return len(self._updates)

    def rate(self) -> float:
        """Return the learning rate of the next update."""
        return self._rate(self._applied + len(self.ledger.applied))

    def apply(
        self,
        version: int,
        staleness: int,
        computed: Mapping[BatchKey, tuple[int, Array, Arrays]],
    ) -> dict[BatchKey, float]:
        """Record an update with staged gradients.

        Args:
            version: The version of the parameters that the update makes.
            staleness: The staleness of the gradients.
            computed: For each batch, the index of the group that computed its gradient; its losses,
                float32, shape (B,); and what the replica returned besides, by names.

        Returns:
            The weight of each batch in the mean gradient, in the order of the keys. It is
            proportional to the number of samples in the batch.
        """
        keys = sorted(computed)
        self.ledger.apply(keys)
        indices = [self.indices(key) for key in keys]
        groups, losses, watched = zip(*(computed[key] for key in keys), strict=True)
        self._updates[version] = Update(
            version,
            tuple(keys),
            tuple(groups),
            staleness,
            torch.from_numpy(np.concatenate(indices)),
            torch.from_numpy(np.concatenate(losses)),
            {
                name: torch.from_numpy(np.concatenate([rows[name] for rows in watched]))
                for name in watched[0]
            },
        )
        samples = sum(map(len, indices))
        return {key: len(part) / samples for key, part in zip(keys, indices, strict=True)}

    def should_stop(self) -> bool:
        """Return whether to stop the epoch early. After the first True, it is always True."""
        self._stopping = self._stopping or (self._stop is not None and self._stop())
        return self._stopping

    def undo(self, version: int, *, lose: bool) -> int:
        """Remove the updates after a version, because the servers were rolled back to it.

        Their batches are lost or queued again. The number of these batches is returned.
        """
        undone = [self._updates.pop(one) for one in list(self._updates) if one > version]
        keys = [key for update in undone for key in update.keys]
        self.ledger.undo(keys, lose=lose)
        self.result.undone += len(undone)
        return len(keys)

    def add_seconds(self, process: ProcessKind, index: int, seconds: Mapping[str, float]) -> None:
        """Add the durations of a process's phases, in seconds."""
        is_worker = process is ProcessKind.WORKER
        total = self.result.workers[index].seconds if is_worker else self.result.servers[index]
        for phase, value in seconds.items():
            total[phase] = total.get(phase, 0.0) + value

    def finish(self) -> EpochResult:
        """Complete the result and return it."""
        in_order = [self._updates[version] for version in sorted(self._updates)]
        for update in in_order:
            for key, group in zip(update.keys, update.groups, strict=True):
                for member in range(self._group_size):
                    worker = self.result.workers[group * self._group_size + member]
                    samples = len(self.indices(key))
                    worker.samples += number_of_samples(samples, member, self._group_size)
                    worker.staleness.append(update.staleness)
        self.result.staleness = [update.staleness for update in in_order]
        self.result.updates = sorted(in_order, key=lambda update: update.keys[0])
        self.result.lost = self.ledger.lost
        self.result.applied = self.ledger.done
        self.result.finished = self.ledger.done == self.ledger.batches
        return self.result


def number_of_samples(batch: int, place: int, size: int) -> int:
    """Return how many samples of a batch a member of a group gets: equally many, or one more."""
    return batch // size + (place < batch % size)
