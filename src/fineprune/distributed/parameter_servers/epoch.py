"""The epoch in progress: which batches are queued, leased or applied, and what it reports."""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError

Array = npt.NDArray[Any]


class BatchKey(NamedTuple):
    """The epoch and the batch of a gradient, both from 0. They identify it on every worker."""

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
            compute, group reduce, pull (the copy of the parameters into the model) and wait (the
            time between two steps, in which the gradient and the parameters are on their way).
    """

    samples: int = 0
    staleness: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class Stepped(NamedTuple):
    """What a worker found out about a batch, or its part of it.

    Attributes:
        losses: The loss of each sample, float32, shape (B,).
        watched: What the replica returned besides, by names, one row per sample.
        seconds: The duration of each phase, in seconds.
    """

    losses: Array
    watched: dict[str, Array]
    seconds: dict[str, float]


class Epoch:
    """The batches of an epoch, each of which is applied once, and what it reports in the end.

    A batch is queued, then leased to a group of workers, then applied. It is queued again if the
    group dies, if an update is made without it, or if the update is undone.

    Args:
        number, batches, rate, weights, applied, stop: As for ``Training.run_epoch``.
        strategy: The strategy, which says how many workers and servers there are.

    Attributes:
        number: The number of the epoch.
        batches: The indices of each batch's samples, int64, shape (B,).
        rate: See ``Training.run_epoch``.
        end: The end of the range of batches that will be applied; a stop lowers it.
        leased: The group that computes each leased batch.
        by_version: The update that made each version of the parameters.
        dropped: The number of gradients that were discarded because they came too late.
        undone: The number of updates that were undone because a server died.
        workers: What each worker did, by rank.
        servers: The duration of each phase of each server: apply (the mean of the gradients and the
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
        if not 0 <= applied <= len(batches):
            raise InputError(f"expected 0 to {len(batches)} applied batches, got {applied}")
        self.batches = [np.asarray(batch.numpy(), dtype=np.int64) for batch in batches]
        if not all(len(batch) for batch in self.batches[applied:]):
            raise InputError("expected batches of at least one sample, got an empty one")
        self._weights = None if weights is None else weights.numpy()
        self._strategy, self._stop, self._first = strategy, stop, applied
        self._queue = list(range(applied, len(batches)))  # sorted
        self._announced: dict[int, int] = {}  # the queued batch that each group probably gets next
        self._stopped = False
        self.number, self.rate, self.end = number, rate, len(batches)
        self.leased: dict[int, int] = {}
        self.by_version: dict[int, AppliedUpdate] = {}
        self.dropped = self.undone = 0
        self.workers = [WorkerTotals() for _ in range(strategy.workers)]
        self.servers: list[dict[str, float]] = [{} for _ in range(strategy.servers)]
        self.snapshot_seconds = 0.0

    def weights(self, indices: Array) -> Array | None:
        """Return the weights of samples' losses, float32, shape (B,); None if they are equal."""
        return None if self._weights is None else self._weights[indices]

    @property
    def applied(self) -> int:
        """The number of applied batches, including those before the epoch was resumed.

        They are exactly the first batches of the epoch when it has ended or stopped.
        """
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
        """The updates, in the order of their first batches.

        Record the indices and losses of each update as one batch, in this order. With ``sync`` and
        no backup workers, it does not depend on the speed of the workers.
        """
        return sorted(self.by_version.values(), key=lambda update: update.keys[0])

    @property
    def staleness(self) -> list[int]:
        """The staleness of each update, in the order in which they were applied."""
        return [update.staleness for _, update in sorted(self.by_version.items())]

    @property
    def seconds(self) -> dict[str, float]:
        """The durations of the phases, summed over all processes."""
        total: dict[str, float] = {}
        for seconds in (*(worker.seconds for worker in self.workers), *self.servers):
            add_seconds(total, seconds)
        return total

    def lease(self, group: int) -> int | None:
        """Lease a batch to a group: the one announced to it, else the lowest; None: there is none.

        If all queued batches are announced to other groups, it gets the lowest of them.
        """
        batch = self._announced.pop(group, None)
        if batch is None:
            others = self._announced.values()
            queued = [one for one in self._queue[: len(others) + 1] if one < self.end]
            free = [one for one in queued if one not in others]
            batch = next(iter(free or queued), None)
        if batch is not None:
            self._queue.remove(batch)
            self._announced = {to: one for to, one in self._announced.items() if one != batch}
            self.leased[batch] = group
        return batch

    def announce(self, group: int, skipped: int = 0) -> int | None:
        """Return the batch that a group probably gets next, so that it can load it.

        Args:
            group: The group, which was just given a batch.
            skipped: The number of queued batches that other groups need before.
        """
        others = self._announced.values()
        queued = self._queue[: len(others) + skipped + 1]
        free = [one for one in queued if one < self.end and one not in others]
        if len(free) <= skipped:
            return None
        self._announced[group] = free[skipped]
        return free[skipped]

    def give_back(self, batch: int) -> None:
        """Queue a leased batch again."""
        del self.leased[batch]
        bisect.insort(self._queue, batch)

    def orphan(self, group: int) -> None:
        """Queue again what a group had, because it died or the parameters were rolled back."""
        for batch in [one for one, holder in self.leased.items() if holder == group]:
            self.give_back(batch)
        self._announced.pop(group, None)

    def look_for_stop(self) -> None:
        """Lower the end if the epoch has to stop: exactly the batches before it are applied.

        The end follows the last applied or leased batch, and what completes its update. Batches
        before it that are queued, for example because a worker died, are still leased.
        """
        if self._stopped or not self._stop():
            return
        self._stopped = True
        last = len(self.batches)
        for queued in reversed(self._queue):
            if queued != last - 1:
                break
            last = queued
        quorum = self._strategy.quorum
        self.end = min(self._first - (self._first - last) // quorum * quorum, len(self.batches))
        self._announced = {to: one for to, one in self._announced.items() if one < self.end}

    def apply(
        self, version: int, staleness: int, computed: Mapping[int, Sequence[Stepped]]
    ) -> dict[int, float]:
        """Record an update.

        Args:
            version: The version of the parameters that the update makes.
            staleness: The staleness of the gradients.
            computed: What the workers found out about each leased batch of the update.

        Returns:
            The weight of each batch in the mean gradient, in the order of the batches. It is
            proportional to the number of samples in the batch.
        """
        order = sorted(computed)
        indices = [self.batches[batch] for batch in order]
        parts = [part for batch in order for part in computed[batch]]
        self.by_version[version] = AppliedUpdate(
            version,
            tuple(BatchKey(self.number, batch) for batch in order),
            tuple(self.leased.pop(batch) for batch in order),
            staleness,
            torch.from_numpy(np.concatenate(indices)),
            torch.from_numpy(np.concatenate([part.losses for part in parts])),
            {
                name: torch.from_numpy(np.concatenate([part.watched[name] for part in parts]))
                for name in parts[0].watched
            },
        )
        samples = sum(map(len, indices))
        return {batch: len(part) / samples for batch, part in zip(order, indices, strict=True)}

    def undo(self, version: int) -> int:
        """Remove the updates after a version, and queue their batches; return their number."""
        undone = [self.by_version.pop(one) for one in list(self.by_version) if one > version]
        batches = [key.batch for update in undone for key in update.keys]
        for batch in batches:
            bisect.insort(self._queue, batch)
        self.undone += len(undone)
        return len(batches)

    def count_samples(self) -> None:
        """Complete the totals of the workers, when no update can be undone any more."""
        size = self._strategy.group
        for _, update in sorted(self.by_version.items()):
            for key, group in zip(update.keys, update.groups, strict=True):
                members = self.workers[group * size : (group + 1) * size]
                parts = divided(self.batches[key.batch], size)
                for worker, part in zip(members, parts, strict=True):
                    worker.samples += len(part)
                    worker.staleness.append(update.staleness)


def add_seconds(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    """Add the durations of phases, in seconds, to their sums."""
    for phase, value in seconds.items():
        total[phase] = total.get(phase, 0.0) + value


def divided(samples: Array, members: int) -> list[Array]:
    """Divide a batch among the members of a group; some get none if it has fewer samples."""
    return np.array_split(samples, members)
