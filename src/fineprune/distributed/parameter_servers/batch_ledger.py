"""The ledger of an epoch's batches, which ensures that each is applied exactly once or lost."""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from fineprune.errors import InputError


class BatchKey(NamedTuple):
    """The epoch and the batch of a gradient, both from 0. They identify it on every worker."""

    epoch: int
    batch: int

    @property
    def number(self) -> int:
        """The key as one number, which travels with the gradient."""
        return self.epoch << 32 | self.batch


class BatchLedger:
    """The batches of one epoch.

    A batch is queued, then leased to a worker, then staged on all servers, then applied or lost.
    Rejected and orphaned batches are queued again. A worker gets the batch that was announced to
    it, or else the lowest queued one. The argument ``worker`` of the methods is the index of a
    group of workers.

    Args:
        epoch: The epoch, from 0.
        batches: The number of batches in the epoch.
        first: The number of batches that were applied before the epoch was interrupted.

    Attributes:
        applied: The applied batches, in the order in which they were applied.
        end: The end of the range of batches that will be applied; ``stop`` lowers it.
    """

    def __init__(self, epoch: int, batches: int, first: int = 0) -> None:
        self.epoch = epoch
        self.batches = batches
        self.end = batches
        self.applied: list[BatchKey] = []
        self._first = first
        self._lost: set[BatchKey] = set()
        # A batch that is announced to a worker is not in the queue, but counts as queued.
        self._queue = [BatchKey(epoch, batch) for batch in range(first, batches)]
        self._announced: dict[int, BatchKey] = {}
        self._holder: dict[BatchKey, int] = {}
        self._staged: dict[BatchKey, None] = {}

    @property
    def lost(self) -> list[BatchKey]:
        """The lost batches, sorted. The parameters contain no gradient of them."""
        return sorted(self._lost)

    @property
    def staged(self) -> list[BatchKey]:
        """The batches whose gradients all servers have received, in the order of arrival."""
        return list(self._staged)

    @property
    def remaining(self) -> int:
        """The number of batches before ``end`` that are neither applied nor lost."""
        return self.end - self.done

    @property
    def done(self) -> int:
        """The number of batches that are applied or lost, including the first ``first`` ones."""
        return self._first + len(self.applied) + len(self._lost)

    def lease(self, worker: int) -> BatchKey | None:
        """Lease a queued batch to a worker. Return it, or None if there is none.

        If all queued batches are announced to other workers, the worker gets the lowest of them.
        """
        key = self._announced.pop(worker, None)
        if key is None and self._queue and self._queue[0].batch < self.end:
            key = heapq.heappop(self._queue)
        if key is None and self._announced:
            other = min(self._announced, key=lambda one: self._announced[one])
            key = self._announced.pop(other)
        if key is None:
            return None
        self._holder[key] = worker
        return key

    def announce(self, worker: int, skipped: int = 0) -> BatchKey | None:
        """Announce to a worker which batch it probably gets next, so that it can load it.

        Args:
            worker: The worker, to which no batch is announced.
            skipped: The number of queued batches that other workers need before.

        Returns:
            The lowest queued batch that is not announced, after the skipped ones; None if there is
            none.
        """
        lowest = [heapq.heappop(self._queue) for _ in range(min(skipped + 1, len(self._queue)))]
        key = lowest.pop() if len(lowest) > skipped and lowest[-1].batch < self.end else None
        for one in lowest:
            heapq.heappush(self._queue, one)
        if key is not None:
            self._announced[worker] = key
        return key

    def stage(self, key: BatchKey) -> None:
        """Note that all servers have received the gradient of a leased batch."""
        self._expect(key in self._holder and key not in self._staged, key, "leased")
        self._staged[key] = None

    def apply(self, keys: Iterable[BatchKey]) -> None:
        """Note that staged gradients have been applied to the parameters."""
        for key in keys:
            self._expect(key in self._staged, key, "staged")
            self._release(key)
            self.applied.append(key)

    def reject(self, key: BatchKey) -> None:
        """Queue a leased or staged batch again."""
        self._expect(key in self._holder, key, "leased or staged")
        self._release(key)
        heapq.heappush(self._queue, key)

    def orphan(self, worker: int) -> list[BatchKey]:
        """Queue the batches of a dead worker again, and return them."""
        keys = sorted(key for key, holder in self._holder.items() if holder == worker)
        for key in keys:
            self.reject(key)
        if worker in self._announced:
            heapq.heappush(self._queue, self._announced.pop(worker))
        return keys

    def stop(self, quorum: int) -> list[BatchKey]:
        """Lower the end as far as possible, so that exactly the batches before it are applied.

        The end follows the last applied batch, and the leased batches directly after it that make
        up whole updates. Batches before the end that are queued, for example because a worker died,
        are still leased. Batches from the end on are not.

        Returns:
            The leased batches from the end on, which are queued again.
        """
        done = [key.batch + 1 for key in (*self.applied, *self._lost)]
        updates = -(-(max(done, default=self._first) - self._first) // quorum)
        end = min(self._first + updates * quorum, self.batches)
        while end < self.batches:
            update = range(end, min(end + quorum, self.batches))
            if any(BatchKey(self.epoch, batch) not in self._holder for batch in update):
                break
            end = update.stop
        self.end = end
        for worker, key in list(self._announced.items()):
            if key.batch >= end:
                heapq.heappush(self._queue, self._announced.pop(worker))
        beyond = sorted(key for key in self._holder if key.batch >= end)
        for key in beyond:
            self.reject(key)
        return beyond

    def undo(self, keys: Iterable[BatchKey], *, lose: bool) -> None:
        """Note that applied batches are no longer in the parameters.

        This takes time in proportion to the number of applied batches.

        Args:
            keys: The batches.
            lose: Whether the batches are lost. Otherwise, they are queued again.
        """
        undone = set(keys)
        for key in undone - set(self.applied):
            self._expect(False, key, "applied")
        self.applied = [key for key in self.applied if key not in undone]
        if lose:
            self._lost |= undone
        else:
            for key in undone:
                heapq.heappush(self._queue, key)

    def _release(self, key: BatchKey) -> None:
        del self._holder[key]
        self._staged.pop(key, None)

    def _expect(self, holds: bool, key: BatchKey, state: str) -> None:
        if not holds:
            raise InputError(f"expected batch {key.batch} of epoch {key.epoch} to be {state}")
