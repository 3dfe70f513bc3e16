"""The epoch in progress: its updates so far, and what it reports in the end."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fineprune.distributed.parameter_servers.batches import Batches, BatchKey
from fineprune.distributed.strategy import Strategy
from fineprune.errors import InputError

Array = npt.NDArray[Any]


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
            compute, group reduce (on CPUs, the part that does not overlap with the backward pass),
            pull (the copy of the parameters into the model) and wait (the time between two steps,
            in which the gradient and the parameters are on their way).
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
        applied: The number of applied batches, including those before the epoch was resumed. They
            are exactly the first batches of the epoch.
        finished: Whether these are all batches of the epoch.
        staleness: The staleness of each update, in the order in which they were applied.
        dropped: The number of gradients that were discarded because they came too late.
        undone: The number of updates that were undone because a server died.
        workers: What each worker did, by rank.
        servers: The duration of each phase of each server: apply (the mean of the gradients and the
            step of the optimizer), which takes place while groups wait.
        snapshot_seconds: The time after the last update in which the servers' state was saved.
    """

    updates: list[AppliedUpdate] = field(default_factory=list)
    applied: int = 0
    finished: bool = False
    staleness: list[int] = field(default_factory=list)
    dropped: int = 0
    undone: int = 0
    workers: list[WorkerTotals] = field(default_factory=list)
    servers: list[dict[str, float]] = field(default_factory=list)
    snapshot_seconds: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """The durations of the phases, summed over all processes."""
        total: Counter[str] = Counter()
        for seconds in (*(worker.seconds for worker in self.workers), *self.servers):
            total.update(seconds)
        return dict(total)


@dataclass(frozen=True)
class Computed:
    """A gradient that a group computed: the losses, and what the replicas returned besides."""

    group: int
    losses: Array
    watched: dict[str, Array]


class Epoch:
    """The epoch in progress.

    Args:
        epoch, batches, rate, weights, applied, stop: As for ``Training.run_epoch``.
        strategy: The strategy, which says how many workers and servers there are.

    Attributes:
        number: The number of the epoch.
        batches: The state of each batch.
        result: The counts so far; ``finish`` adds everything else.
        rate: See ``Training.run_epoch``.
    """

    def __init__(
        self,
        epoch: int,
        batches: Sequence[Tensor],
        rate: Callable[[int], float],
        strategy: Strategy,
        weights: Tensor | None = None,
        applied: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.number = epoch
        self.batches = Batches(len(batches), applied)
        self._indices = [np.asarray(batch.numpy(), dtype=np.int64) for batch in batches]
        if not all(len(batch) for batch in self._indices[applied:]):
            raise InputError("expected batches of at least one sample, got an empty one")
        self._weights = None if weights is None else weights.numpy()
        self._group_size = strategy.group
        self._stop = stop
        self._stopping = False
        self._updates: dict[int, AppliedUpdate] = {}
        self.rate = rate
        self.result = EpochResult(
            workers=[WorkerTotals() for _ in range(strategy.workers)],
            servers=[{} for _ in range(strategy.servers)],
        )

    def indices(self, batch: int) -> Array:
        """Return the indices of a batch's samples, int64, shape (B,)."""
        return self._indices[batch]

    def weights(self, batch: int) -> Array | None:
        """Return the weights of a batch's losses, float32, shape (B,); None if they are equal."""
        return None if self._weights is None else self._weights[self._indices[batch]]

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return len(self._updates)

    @property
    def stopping(self) -> bool:
        """Whether to stop the epoch early. After the first True, it is always True."""
        self._stopping = self._stopping or self._stop()
        return self._stopping

    def apply(
        self, version: int, staleness: int, computed: Mapping[int, Computed]
    ) -> dict[int, float]:
        """Record an update.

        Args:
            version: The version of the parameters that the update makes.
            staleness: The staleness of the gradients.
            computed: The gradient of each leased batch of the update.

        Returns:
            The weight of each batch in the mean gradient, in the order of the batches. It is
            proportional to the number of samples in the batch.
        """
        order = sorted(computed)
        self.batches.apply(order)
        parts = [computed[batch] for batch in order]
        indices = [self._indices[batch] for batch in order]
        self._updates[version] = AppliedUpdate(
            version,
            tuple(BatchKey(self.number, batch) for batch in order),
            tuple(part.group for part in parts),
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
        undone = [self._updates.pop(one) for one in list(self._updates) if one > version]
        batches = [key.batch for update in undone for key in update.keys]
        self.batches.undo(batches)
        self.result.undone += len(undone)
        return len(batches)

    def finish(self) -> EpochResult:
        """Complete the result and return it."""
        result = self.result
        in_order = [self._updates[version] for version in sorted(self._updates)]
        for update in in_order:
            for key, group in zip(update.keys, update.groups, strict=True):
                for place in range(self._group_size):
                    worker = result.workers[group * self._group_size + place]
                    samples = len(self._indices[key.batch])
                    worker.samples += number_of_samples(samples, place, self._group_size)
                    worker.staleness.append(update.staleness)
        result.staleness = [update.staleness for update in in_order]
        result.updates = sorted(in_order, key=lambda update: update.keys[0])
        result.applied = self.batches.done
        result.finished = self.batches.finished
        return result


def add_seconds(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    """Add the durations of phases, in seconds, to their sums."""
    for phase, value in seconds.items():
        total[phase] = total.get(phase, 0.0) + value


def number_of_samples(batch: int, place: int, size: int) -> int:
    """Return how many samples of a batch a member of a group gets: equally many, or one more."""
    return batch // size + (place < batch % size)
