"""The epoch in progress: which batches are queued, leased or applied, and what it reports."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fineprune.distributed.strategy import Strategy

Array = npt.NDArray[Any]


class BatchKey(NamedTuple):
    """The epoch and the batch of a gradient, both from 0."""

    epoch: int
    batch: int


@dataclass(frozen=True)
class AppliedUpdate:
    """One update of the parameters.

    Attributes:
        version: The version of the parameters that the update made.
        keys: The batches of the update, sorted.
        groups: The index of the group that computed the gradient of each batch.
        staleness: The staleness of the gradients, which is the same for all of them.
        indices: The indices of the samples, int64, shape (B,), batch after batch.
        losses: Their losses with the parameters that the workers had read, float32, shape (B,).
        watched: What the replica returned besides, by names: tensors with one row per sample.
    """

    version: int
    keys: tuple[BatchKey, ...]
    groups: tuple[int, ...]
    staleness: int
    indices: Tensor
    losses: Tensor
    watched: dict[str, Tensor]


class Stepped(NamedTuple):
    """What a worker found out about its part of a batch, and the seconds of each phase.

    The losses are float32, shape (B,). The arrays in ``watched`` have one row per sample.
    """

    losses: Array
    watched: dict[str, Array]
    seconds: dict[str, float]


@dataclass(eq=False)
class Lease:
    """A batch that a group of workers computes. It ends early if the gradient is not needed.

    Attributes:
        group: The index of the group.
        batch: The batch.
        following: The batch that is reserved for the group, which it can load meanwhile, if any.
        version: The version of the parameters with which it is computed.
        missing: The number of calls of the group that have not been answered.
        stepped: What the members found out, by their ranks.
        gradients: Ray's references to the parts of the mean gradient, one for each server.
        arrived: When the gradient was complete; 0 before.
    """

    group: int
    batch: int
    following: int | None
    version: int
    missing: int = 0
    stepped: dict[int, Stepped] = field(default_factory=dict)
    gradients: list[Any] = field(default_factory=list)
    arrived: float = 0.0


class Epoch:
    """The batches of an epoch, each of which is applied once, and what it reports in the end.

    A batch is queued, then leased to a group of workers, then applied. It is queued again if the
    group dies, if an update is made without it, or if the update is undone. The arguments are those
    of ``Training.run_epoch``.

    Attributes:
        batches: The indices of each batch's samples, int64, shape (B,).
        end: The end of the range of batches that will be applied; a stop lowers it.
        leased: The leases, by the indices of the groups.
        by_version: The update that made each version of the parameters.
        dropped: The number of gradients that were discarded because they came too late.
        undone: The number of updates that were undone because a server died.
        workers: The seconds of each worker in each phase: data (the wait for a batch that is being
            loaded), compute, group reduce, pull (the copy of the parameters into the model) and
            wait (between two steps: the gradient and the parameters are on their way).
        servers: The seconds of each server in each phase: apply (the mean of the gradients and the
            step of the optimizer), which takes place while groups wait.
        snapshot_seconds: The time after the last update in which the servers' state was saved.
    """

    def __init__(
        self,
        number: int,
        batches: Sequence[Tensor],
        rate: Callable[[int], float],
        strategy: Strategy,
        weights: Tensor | None = None,
        applied: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.number, self.rate, self.end = number, rate, len(batches)
        self.batches = [batch.numpy() for batch in batches]
        self.weights = None if weights is None else weights.numpy()
        self._strategy, self._stop, self._first = strategy, stop, applied
        self._queue = list(range(applied, len(batches)))  # sorted
        self._reserved: dict[int, int] = {}  # the queued batch that each group probably gets next
        self.leased: dict[int, Lease] = {}
        self.by_version: dict[int, AppliedUpdate] = {}
        self.dropped = self.undone = 0
        self.workers: list[dict[str, float]] = [{} for _ in range(strategy.workers)]
        self.servers: list[dict[str, float]] = [{} for _ in range(strategy.servers)]
        self.snapshot_seconds = 0.0

    @property
    def applied(self) -> int:
        """The number of applied batches, including those before the epoch was resumed."""
        return len(self.batches) - len(self._queue) - len(self.leased)

    @property
    def remaining(self) -> int:
        """The number of batches before ``end`` that are not applied."""
        return self.end - self.applied

    @property
    def finished(self) -> bool:
        """Whether all batches of the epoch are applied."""
        return self.applied == len(self.batches)

    @property
    def updates(self) -> list[AppliedUpdate]:
        """The updates, each of which counts as a batch, in the order of their first batches.

        With ``sync`` and no backup workers, it does not depend on the speed of the workers.
        """
        return sorted(self.by_version.values(), key=lambda update: update.keys[0])

    def lease(self, group: int, version: int) -> Lease | None:
        """Lease a batch to a group: the one reserved for it, else the lowest that is not reserved.

        If all are reserved for others, it gets the lowest of them. None: no batch is queued.
        """
        quorum = self._strategy.quorum
        few = self._queue[: len(self._reserved) + quorum + 1]
        queued = [batch for batch in few if batch < self.end]
        taken = {batch for other, batch in self._reserved.items() if other != group}
        free = [batch for batch in queued if batch not in taken]
        batch = self._reserved.pop(group, next(iter(free or queued), None))
        if batch is None:
            return None
        self._queue.remove(batch)
        self._reserved = {of: one for of, one in self._reserved.items() if one != batch}
        # The groups of a synchronous update that have no lease yet get the lowest batches.
        absent = max(0, quorum - len(self.leased) - 1)
        following = next(iter([one for one in free if one != batch][absent:]), None)
        if following is not None:
            self._reserved[group] = following
        self.leased[group] = lease = Lease(group, batch, following, version)
        return lease

    def give_back(self, group: int, *, died: bool = True) -> None:
        """Queue again what a group computes. If it died, it has no reservation any more."""
        if group in self.leased:
            bisect.insort(self._queue, self.leased.pop(group).batch)
        if died:
            self._reserved.pop(group, None)

    def look_for_stop(self) -> None:
        """If the epoch has to stop, lower its end: exactly the batches before it are then applied.

        It follows the last applied or leased batch, and what completes its update.
        """
        if not self._stop():
            return
        last = 1 + max({*range(len(self.batches))} - {*self._queue}, default=-1)
        quorum = self._strategy.quorum
        self.end = min(self._first - (self._first - last) // quorum * quorum, len(self.batches))
        self._reserved = {of: one for of, one in self._reserved.items() if one < self.end}

    def apply(self, version: int, leases: Sequence[Lease]) -> list[float]:
        """Record the update that makes a version, whose leases are in the order of their batches.

        Return the weight of each batch, which is proportional to its number of samples.
        """
        indices = [self.batches[lease.batch] for lease in leases]
        parts = [lease.stepped[rank] for lease in leases for rank in sorted(lease.stepped)]
        for lease in leases:
            del self.leased[lease.group]
        self.by_version[version] = AppliedUpdate(
            version,
            tuple(BatchKey(self.number, lease.batch) for lease in leases),
            tuple(lease.group for lease in leases),
            version - 1 - leases[0].version,
            torch.from_numpy(np.concatenate(indices)),
            torch.from_numpy(np.concatenate([part.losses for part in parts])),
            {
                name: torch.from_numpy(np.concatenate([part.watched[name] for part in parts]))
                for name in parts[0].watched
            },
        )
        samples = sum(map(len, indices))
        return [len(part) / samples for part in indices]

    def undo(self, version: int) -> int:
        """Remove the updates after a version, and queue their batches; return their number."""
        undone = [self.by_version.pop(one) for one in list(self.by_version) if one > version]
        batches = [key.batch for update in undone for key in update.keys]
        self._queue = sorted(self._queue + batches)
        self.undone += len(undone)
        return len(batches)

    def report(self) -> dict[str, Any]:
        """Return what happened, when no update can be undone any more.

        ``staleness`` is the number of updates with a staleness of 0, 1, 2 and so on; that of a
        worker is the staleness of the updates with a gradient of its group.
        """
        size, updates = self._strategy.group, self.by_version.values()
        seen: list[list[tuple[int, int]]] = [[] for _ in self.workers]
        for update in updates:
            for key, group in zip(update.keys, update.groups, strict=True):
                for place, part in enumerate(divided(self.batches[key.batch], size)):
                    seen[group * size + place].append((len(part), update.staleness))
        seconds: dict[str, float] = {}
        for process in (*self.workers, *self.servers):
            add_seconds(seconds, process)
        return {
            "staleness": _histogram(update.staleness for update in updates),
            "dropped": self.dropped,
            "undone": self.undone,
            "seconds": seconds,
            "workers": [
                {
                    "samples": sum(samples for samples, _ in parts),
                    "staleness": _histogram(staleness for _, staleness in parts),
                    "seconds": phases,
                }
                for parts, phases in zip(seen, self.workers, strict=True)
            ],
            "servers": self.servers,
        }


def add_seconds(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    """Add the durations of phases, in seconds, to their sums."""
    for phase, value in seconds.items():
        total[phase] = total.get(phase, 0.0) + value


def divided(samples: Array, members: int) -> list[Array]:
    """Divide a batch among the members of a group; the last get none if it has fewer samples."""
    return np.array_split(samples, min(members, len(samples)))


def _histogram(values: Iterable[int]) -> list[int]:
    counts: list[int] = np.bincount(np.fromiter(values, np.int64)).tolist()
    return counts
