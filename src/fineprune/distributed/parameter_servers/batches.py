"""The batches of an epoch: which are queued, which a group computes, and which are applied."""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from fineprune.errors import InputError


class BatchKey(NamedTuple):
    """The epoch and the batch of a gradient, both from 0. They identify it on every worker."""

    epoch: int
    batch: int


class Batches:
    """The batches of one epoch, each of which is applied once.

    A batch is queued, then leased to a group of workers, then applied. It is queued again if the
    group dies, if an update is made without it, or if the update is undone. A group gets the batch
    that was announced to it, or else the lowest queued one.

    Args:
        batches: The number of batches in the epoch.
        first: The number of batches that were applied before the epoch was interrupted.

    Attributes:
        end: The end of the range of batches that will be applied; ``stop`` lowers it.
        leased: The group that computes each leased batch.
    """

    def __init__(self, batches: int, first: int = 0) -> None:
        if not 0 <= first <= batches:
            raise InputError(f"expected 0 to {batches} applied batches, got {first}")
        self.end = batches
        self.leased: dict[int, int] = {}
        self._batches = batches
        self._first = first
        self._applied: set[int] = set()
        self._queue = list(range(first, batches))
        self._announced: dict[int, int] = {}

    @property
    def done(self) -> int:
        """The number of applied batches, including the first ``first`` ones."""
        return self._first + len(self._applied)

    @property
    def remaining(self) -> int:
        """The number of batches before ``end`` that are not applied."""
        return self.end - self.done

    @property
    def finished(self) -> bool:
        """Whether all batches of the epoch are applied."""
        return self.done == self._batches

    def lease(self, group: int) -> int | None:
        """Lease a queued batch to a group. Return it, or None if there is none.

        If all queued batches are announced to other groups, it gets the lowest of them.
        """
        batch = self._announced.pop(group, None)
        if batch is None and self._queue and self._queue[0] < self.end:
            batch = heapq.heappop(self._queue)
        if batch is None and self._announced:
            other = min(self._announced, key=lambda one: self._announced[one])
            batch = self._announced.pop(other)
        if batch is not None:
            self.leased[batch] = group
        return batch

    def announce(self, group: int, skipped: int = 0) -> int | None:
        """Announce to a group which batch it probably gets next, so that it can load it.

        Args:
            group: The group, to which no batch is announced.
            skipped: The number of queued batches that other groups need before.

        Returns:
            The lowest queued batch after the skipped ones; None if there is none.
        """
        lowest = heapq.nsmallest(skipped + 1, self._queue)
        if len(lowest) <= skipped or lowest[-1] >= self.end:
            return None
        self._queue.remove(lowest[-1])
        heapq.heapify(self._queue)
        self._announced[group] = lowest[-1]
        return lowest[-1]

    def apply(self, batches: Iterable[int]) -> None:
        """Note that leased batches are applied."""
        for batch in batches:
            del self.leased[batch]
            self._applied.add(batch)

    def give_back(self, batch: int) -> None:
        """Queue a leased batch again."""
        del self.leased[batch]
        heapq.heappush(self._queue, batch)

    def orphan(self, group: int) -> None:
        """Queue again what a group had, because it died or the parameters were rolled back."""
        for batch in [one for one, holder in self.leased.items() if holder == group]:
            self.give_back(batch)
        if group in self._announced:
            heapq.heappush(self._queue, self._announced.pop(group))

    def undo(self, batches: Iterable[int]) -> None:
        """Queue applied batches again, because the parameters no longer contain them."""
        for batch in batches:
            self._applied.remove(batch)
            heapq.heappush(self._queue, batch)

    def stop(self, quorum: int) -> list[int]:
        """Lower the end as far as possible, so that exactly the batches before it are applied.

        The end follows the last applied batch, and the leased batches directly after it that make
        up whole updates. Batches before the end that are queued, for example because a worker died,
        are still leased.

        Returns:
            The groups whose leased batches are from the end on, and are queued again.
        """
        last = max(self._applied, default=self._first - 1) + 1
        updates = -(-(last - self._first) // quorum)
        end = min(self._first + updates * quorum, self._batches)
        while end < self._batches:
            update = range(end, min(end + quorum, self._batches))
            if any(batch not in self.leased for batch in update):
                break
            end = update.stop
        self.end = end
        for group, batch in list(self._announced.items()):
            if batch >= end:
                heapq.heappush(self._queue, self._announced.pop(group))
        beyond = sorted(batch for batch in self.leased if batch >= end)
        groups = [self.leased[batch] for batch in beyond]
        for batch in beyond:
            self.give_back(batch)
        return groups
