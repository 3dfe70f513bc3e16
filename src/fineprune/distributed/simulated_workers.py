"""Workers simulated in one process: the effect of stale gradients without a cluster.

Each simulated worker, or group of workers, computes its gradient at the weights that it has read.
The order of the updates follows from the durations of the steps and from the rule of real servers:
N equally fast workers take turns, so N - 1 updates of others come between a worker's read and its
own update, and the gradients of a slow one are staler. Nothing waits: durations are only compared.

The gradient of a group, or of synchronous workers, is the mean over several batches, which the
training loop accumulates. Which batches synchronous backup workers delay is not simulated.

As with real servers, all workers read the same weights at the start of an epoch.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fineprune.distributed.parameter_servers.update_rule import UpdateRule


class Gradient(NamedTuple):
    """A gradient that is computed: its worker, and the version that this one has read."""

    worker: int
    version: int


class Update(NamedTuple):
    """The version that an update makes, from 1, whose gradient it is, and who reads it at once."""

    version: int
    staleness: int
    worker: int
    readers: tuple[int, ...]


class SimulatedWorkers:
    """The weights that each of N workers has read, and the weights on the server.

    During an epoch, the model holds the weights of the worker whose gradient is applied next.

    Args:
        model: The model that the workers train. Each has its own parameters; all share the buffers.
        workers: The number N of workers or groups, at least 1.
        seconds: The usual duration of a step of each worker, in any unit; empty if they are equal.
        spread: The standard deviation of the logarithm of the durations.
        bound: The largest staleness; None for no bound.
        seed: The seed from which the durations are drawn.
    """

    def __init__(
        self,
        model: nn.Module,
        workers: int,
        seconds: Sequence[float] = (),
        spread: float = 0.0,
        bound: int | None = None,
        seed: int = 0,
    ) -> None:
        self._model = [p.data for p in model.parameters()]
        self._server = [torch.empty_like(p) for p in self._model]
        self._read = [[torch.empty_like(p) for p in self._model] for _ in range(workers)]
        self._seconds = list(seconds) or [1.0] * workers
        self._spread, self._rule, self._seed = spread, UpdateRule(bound=bound), seed
        self._next: Update

    def begin_epoch(self, epoch: int = 0) -> None:
        """Let all workers read the model's weights and begin a step."""
        for copy in (self._server, *self._read):
            torch._foreach_copy_(copy, self._model)
        self._go_to(epoch, 0)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the gradient on the server, let its worker read, and turn to the next worker."""
        torch._foreach_copy_(self._model, self._server)
        optimizer.step()
        torch._foreach_copy_(self._server, self._model)
        for reader in self._next.readers:
            torch._foreach_copy_(self._read[reader], self._model)
        self._next = next(self._updates)
        torch._foreach_copy_(self._model, self._read[self._next.worker])

    def end_epoch(self) -> None:
        """Put the server's weights into the model."""
        torch._foreach_copy_(self._model, self._server)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the middle of an epoch; it holds tensors and whole numbers."""
        return {
            "server": self._server,
            "read": self._read,
            "epoch": self._epoch,
            "updates": self._next.version - 1,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of the same number of workers, and set the model's weights accordingly."""
        for own, saved in zip(
            (self._server, *self._read), (state["server"], *state["read"]), strict=True
        ):
            torch._foreach_copy_(own, saved)
        self._go_to(state["epoch"], state["updates"])
        torch._foreach_copy_(self._model, self._read[self._next.worker])

    def _go_to(self, epoch: int, done: int) -> None:
        """Set the next update, after so many of an epoch."""
        self._epoch = epoch
        self._updates = simulated_updates(self._rule, len(self._read), self._duration)
        self._next = next(itertools.islice(self._updates, done, None))

    def _duration(self, worker: int, step: int) -> float:
        if not self._spread:
            return self._seconds[worker]
        place = [self._seed, self._epoch, worker, step]
        drawn = np.random.default_rng(place).standard_normal()
        return self._seconds[worker] * math.exp(self._spread * drawn)


def simulated_updates(
    rule: UpdateRule, workers: int, duration: Callable[[int, int], float]
) -> Iterator[Update]:
    """Yield the updates, without end, of asynchronous workers whose steps alone take time.

    All workers that may start read version 0 at time 0.

    ``duration`` returns how long a worker computes, given its number and that of its step, both
    from 0. Of workers that end at the same time, the lower number is first.
    """
    steps = [itertools.count() for _ in range(workers)]
    ends: list[tuple[float, int]] = []  # a heap
    waiting: list[Gradient] = []
    computing: dict[int, Gradient] = {}
    version, now = 0, 0.0

    def start() -> tuple[int, ...]:
        """Let the idle workers that may start do so; return who they are."""
        readers = []
        for worker in sorted({*range(workers)} - {*computing, *(one.worker for one in waiting)}):
            if rule.may_start(len(waiting) + len(computing)):
                computing[worker] = Gradient(worker, version)
                heapq.heappush(ends, (now + duration(worker, next(steps[worker])), worker))
                readers.append(worker)
        return tuple(readers)

    def following() -> list[Gradient]:
        return rule.next_update(waiting, list(computing.values()), version, remaining=1)

    start()
    while True:
        while not (taken := following()):
            now, worker = heapq.heappop(ends)
            waiting.append(computing.pop(worker))
        (gradient,) = taken
        waiting.remove(gradient)
        version += 1
        # Gradients that waited for the same one are applied before the next read.
        readers = () if following() else start()
        yield Update(version, version - 1 - gradient.version, gradient.worker, readers)
