"""When gradients make an update: the one rule of all strategies. It knows neither Ray nor clocks.

The driver of real servers and simulated workers use it (Campos et al., ICCS 2017,
section 5; backup workers: Chen et al., 2016). *Staleness* is the number of updates between the
read of the parameters and the update with the gradient.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fineprune.errors import InputError


class Gradient(NamedTuple):
    """A gradient that is computed: its worker (or group), and the version that this one has read.

    The version of the parameters is the number of updates so far.
    """

    worker: int
    version: int


@dataclass(frozen=True)
class UpdateRule:
    """When gradients make an update.

    Attributes:
        quorum: Synchronous: an update averages so many gradients of the current version, and all
            later ones of this version are discarded. None: asynchronous, each gradient is an update
            of its own.
        bound: The largest staleness of an asynchronous gradient; None for no bound.
    """

    quorum: int | None = None
    bound: int | None = None

    def may_start(self, in_flight: int) -> bool:
        """Return whether a worker may read the parameters now.

        Args:
            in_flight: The number of gradients that are computed or wait for their update.
        """
        return self.bound is None or in_flight <= self.bound

    def next_update(
        self,
        waiting: Sequence[Gradient],
        computing: Sequence[Gradient],
        version: int,
        remaining: int,
    ) -> list[Gradient]:
        """Return the gradients of the next update; empty if it has to wait.

        Args:
            waiting: The complete gradients, in the order of their arrival.
            computing: The gradients that are still computed, by workers that are alive.
            version: The current version of the parameters.
            remaining: The number of gradients that the epoch still needs. The last synchronous
                update averages fewer.
        """
        if self.quorum is not None:
            fresh = [gradient for gradient in waiting if gradient.version == version]
            number = min(self.quorum, remaining)
            return fresh[:number] if number and len(fresh) >= number else []
        if self.bound is None:
            return list(waiting[:1])
        for gradient in waiting:
            others = [other.version for other in (*waiting, *computing) if other is not gradient]
            if self._leaves_time(others, version + 1):
                return [gradient]
        return []

    def _leaves_time(self, others: Sequence[int], version: int) -> bool:
        """Return whether gradients that were read at these versions can all keep the bound."""
        if self.bound is None:
            return True
        return all(
            read + self.bound >= version + place for place, read in enumerate(sorted(others))
        )


class Update(NamedTuple):
    """An update of simulated workers.

    Attributes:
        time: When it takes place, in the unit of the durations.
        version: The version that it makes, from 1.
        staleness: The staleness of its gradients.
        workers: Who computed them.
        readers: Who reads this version at once.
    """

    time: float
    version: int
    staleness: int
    workers: tuple[int, ...]
    readers: tuple[int, ...]


def simulated_updates(
    rule: UpdateRule,
    workers: int,
    duration: Callable[[int, int], float],
    batches: int | None = None,
) -> Iterator[Update]:
    """Yield the updates of workers whose steps take a given time, while all else takes none.

    All workers that may start read version 0 at time 0.

    Args:
        rule: The rule of the updates.
        workers: The number of workers, at least 1.
        duration: Returns how long a worker computes, given its number and that of its own step,
            both from 0. Of workers that end at the same time, the one with the lower number is
            first.
        batches: The number of gradients that are applied; None for no end.

    Raises:
        InputError: There are fewer workers than the rule needs, or a negative bound.
    """
    if workers < max(1, rule.quorum or 1) or (rule.bound or 0) < 0:
        raise InputError(f"expected as many workers as {rule} needs, got {workers}")
    version, now = 0, 0.0
    done = queued = 0
    steps = [itertools.count() for _ in range(workers)]
    idle = list(range(workers))
    ends: list[tuple[float, int]] = []
    waiting: list[Gradient] = []
    computing: dict[int, Gradient] = {}

    def start() -> list[int]:
        nonlocal queued
        started = []
        for worker in sorted(idle):
            more = batches is None or queued < batches
            if more and rule.may_start(len(waiting) + len(computing)):
                queued += 1
                computing[worker] = Gradient(worker, version)
                heapq.heappush(ends, (now + duration(worker, next(steps[worker])), worker))
                started.append(worker)
        idle[:] = [worker for worker in idle if worker not in started]
        return started

    def following() -> list[Gradient]:
        remaining = len(waiting) + len(computing) if batches is None else batches - done
        return rule.next_update(waiting, list(computing.values()), version, remaining)

    start()
    while batches is None or done < batches:
        if taken := following():
            staleness = version - taken[0].version
            version += 1
            done += len(taken)
            waiting = [gradient for gradient in waiting if gradient not in taken]
            idle += [gradient.worker for gradient in taken]
            if rule.quorum is not None:  # The batches of the others are queued again.
                queued -= len(waiting) + len(computing)
                idle += [gradient.worker for gradient in waiting]
                waiting, computing = [], {}
            of = tuple(sorted(gradient.worker for gradient in taken))
            # Gradients that waited for the same one are applied before the next read.
            readers = () if following() else tuple(start())
            yield Update(now, version, staleness, of, readers)
            continue
        now, worker = heapq.heappop(ends)
        if worker in computing:
            waiting.append(computing.pop(worker))
        else:  # Its gradient was discarded while it computed.
            idle.append(worker)
            start()
